"""Which suites are measured, how, by how many processes, and what the figures are."""
