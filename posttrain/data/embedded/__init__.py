"""What does the quickstart train on?  Small generated data in the schemas of the three real sets, and a base model.

Everything is drawn from `derive_seed(seed, ...)`, row by row, so row 17 is the same in any process and for any `n`.

- `openmathinstruct`: word problems with worked steps and a boxed answer, and formulas. A few per cent are the kinds of
  row the real filters exist for: wrong answers, code solutions, two boxes, duplicates.
- `capybara`: small talk in which a fact told early is asked for later, open questions answered in exactly `SENTENCES`
  sentences, and dialogues in which all of these and sums follow each other in any order. **The answers to open
  questions repeat themselves on purpose**, as scraped text does: from the third on, each sentence is, with probability
  `REPEAT`, a copy of an earlier one. A model trained on them really repeats itself, and the fixed number of sentences
  means that it cannot repeat less by merely saying less.
- `ultrafeedback`: pairs of answers. In the chosen one no sentence comes twice; the rejected one, equally long, repeats
  sentences, or its box holds a number of the question instead of the result, or it breaks the rules of an environment.
  Some come late in a dialogue.
- `prompts`: open questions without answers.
- `demonstrations`: episodes of the environments: of the lake and of Sokoban by weak scripted policies, which teach the
  format and the rules, not the skill; of the others by the expert.

Held-out sets are disjoint from training by construction: a hash of the question (or the operands, the dialogue, the
topic) decides its side, whatever the seed. The facts of the held-out dialogues come from the same lists of names,
animals, colours, ... as in training; it is their combination that is new. Pairs about environments are on other levels,
but two levels can look alike to a player who sees its neighbourhood alone: about one held-out pair in a hundred.
"""

from __future__ import annotations

from posttrain.data.embedded.arithmetic import math_problems, openmathinstruct
from posttrain.data.embedded.base_model import build_base
from posttrain.data.embedded.conversations import capybara, open_prompts, recall_dialogues, training_prompts
from posttrain.data.embedded.environments import demonstrations
from posttrain.data.embedded.preferences import preference_pairs, ultrafeedback

__all__ = [
    "build_base",
    "capybara",
    "demonstrations",
    "math_problems",
    "open_prompts",
    "openmathinstruct",
    "preference_pairs",
    "recall_dialogues",
    "training_prompts",
    "ultrafeedback",
]
