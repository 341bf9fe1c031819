"""How do agent programs play?  They ask for turns at a server of the run, by OpenAI's interface."""
