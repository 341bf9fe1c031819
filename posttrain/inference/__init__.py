"""What stands between a model and a person?  The parts that inference_with_improved_settings.py puts together.

generation.py      the model answers token by token
conversation.py    what was said so far, and which of it the model still sees
display.py         answers on the terminal, one or several beside each other, and what is said about them
keyboard.py        messages as they are typed or pasted, and Ctrl-C
playing.py         episodes of an environment, shown turn by turn
"""
