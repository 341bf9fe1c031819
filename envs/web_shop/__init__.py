"""Can the model buy what an instruction asks for?  WebShop (Yao et al. 2022, arXiv 2207.01206) as a shop of text.

`environment` is the episode, `pages` what is shown and can be clicked, `reward` the published score, `catalogue` the
products, goals and search; `generated` makes the embedded catalogue, `published` reads WebShop's own files.
"""

from envs.web_shop.environment import WebShop

__all__ = ["WebShop"]
