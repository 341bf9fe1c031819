"""How does a user chat with a model in a browser?  The page of `inference_with_improved_settings.py --web`, by gradio.

server.py      the application and its address
guard.py       whose requests are answered: the password, size limits, the queue
talking.py     the tab with the conversation: one or two answers, settings, figures, export
playing.py     the tab where the model plays an environment, one turn at a time
events.py      functions of both tabs

Generation, history, presets and figures are those of the terminal: the other modules of posttrain/serving/.
"""
