"""How is a model put on the Hub, with a card that tells the truth and nothing of the machine it was trained on?

    posttrain publish runs/quickstart --repo OWNER/NAME           says what would be published
    posttrain publish runs/quickstart --repo OWNER/NAME --yes     publishes it, privately

__main__.py     the command
content.py      which files, and what is in them
measured.py     what an evaluation adds: card, .eval_results/, pictures
privacy.py      paths and secrets
hub.py          the upload
"""
