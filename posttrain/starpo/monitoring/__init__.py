"""What is phase 3 doing, and does it go wrong?  Figures, diagnostics, alarms, transcripts; nothing changes an update.

episodes.py      figures of a rollout and of an evaluation
updates.py       figures of an update
collapse.py      RAGEN-2's diagnostics: thoughts under other prompts, gradients by the std of rewards
alarms.py        does the run diverge or collapse?  alarm_rules.py: the rules; alarm_series.py: the noise of a figure;
                 alarm_limits.py: limits and advice
watch.py         the alarms of a run, and whether it stops early
monitor.py       writes all of it: metrics.jsonl, dashboards, progress bar
transcripts.py   whole episodes to read, and pictures of them
token_figures.py   log-prob, entropy, advantage and loss mask of each of their tokens
docs/metrics.md says what each figure means and what to do about it.
"""
