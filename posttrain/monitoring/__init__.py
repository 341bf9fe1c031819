"""What is phase 3 doing, and is it well?  Figures, diagnostics, alarms, transcripts: nothing here changes an update.

episodes.py      figures of a rollout and of an evaluation
updates.py       figures of an update
collapse.py      RAGEN-2's diagnostics: thoughts under other prompts, gradients by the std of rewards
watch.py         alarms, and what a run may do about them
transcripts.py   whole episodes to read, and pictures of them
docs/metrics.md says what each figure means and what to do about it.
"""
