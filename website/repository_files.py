"""Which files does the site have beside its own pages?  The documents, and what they link to in the repository.

A link between documents is thus the same on the site and in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "benchmarks/*.md")
LINK = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents, and the files and pictures that they link to, under their own paths."""
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    wanted = dict.fromkeys(documents)
    for document in documents:
        for link in LINK.findall(document.read_text(encoding="utf-8")):
            target = (document.parent / link).resolve()
            if "://" not in link and target.is_file() and target.is_relative_to(ROOT):
                wanted.setdefault(target)
    for path in wanted:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
