"""How is a model published on the Hub, with a correct card and without private data of its machine?

    posttrain publish runs/quickstart --repo OWNER/NAME           lists the files
    posttrain publish runs/quickstart --repo OWNER/NAME --yes     publishes it, privately

__main__.py     the command
content.py      which files, and their content
measured.py     results of an evaluation: card, .eval_results/, pictures
privacy.py      paths and secrets
hub.py          the upload
"""
