"""How does a user chat with a model in a browser?  The page of `inference_with_improved_settings.py --web`, by gradio.

server.py      the application and its address
guard.py       whose requests are answered: the password, size limits, the queue
about.py       what it says about a model: name, training, examples
talking.py     the tab with the conversation: one or two answers, settings, figures, export
playing.py     the tab where the model plays an environment, a turn or a level at a time
level_view.py  that level for the player of posttrain/report (level_view.js follows it in the browser)
names.js       the names of models and messages, for screen readers
lists.js       a list with choices closes when it loses the focus
events.py      functions of both tabs
page.css       how it looks beside gradio's theme

Generation, history, presets and figures are those of the terminal: the other modules of posttrain/serving/.
"""
