"""How does one talk to a model in a browser?  The page of `inference_with_improved_settings.py --web`, by gradio.

server.py      the address, the page as a whole
guard.py       whose requests are answered: the password, other websites
talking.py     the tab with the conversation: one or two answers as they come, settings, figures, export
playing.py     the tab where the model plays an environment, one turn at a time
events.py      what both tabs need

Generation, history, presets and figures are those of the terminal: the other modules of posttrain/serving/.
"""
