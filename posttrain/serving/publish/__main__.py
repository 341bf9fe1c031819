"""List what would be published, and, with --yes, publish it.

    posttrain publish runs/quickstart --repo OWNER/NAME
    posttrain publish runs/phase3/final --repo OWNER/NAME --yes

RUN is a phase's folder, its folder `final`, or the folder of phase1, phase2 and phase3, whose last model is published.
Without --yes no request is made. The repository is private unless --public is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.config import run
from posttrain.runtime import runlog
from posttrain.types import UserError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run or the folder of a model")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="name on the Hub")
    parser.add_argument("--yes", action="store_true", help="publish; without it the files are only listed")
    parser.add_argument("--public", action="store_true", help="everybody may read it")
    parser.add_argument(
        "--include", nargs="+", default=[], metavar="NAME", help="further files or folders of the phase: metrics.jsonl"
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="output_dir of the evaluation, if not RUN's own")
    parser.add_argument("--folder", type=Path, help="also write the published files there")
    options = parser.parse_args(argv)
    runlog.keep_private(options.run)

    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from posttrain.serving.publish import content, hub

    try:
        validate_repo_id(options.repo)
        if options.repo.count("/") != 1:
            raise HFValidationError("it has no owner")
    except HFValidationError as error:
        raise UserError(f"--repo {options.repo} is not a name on the Hub ({error}). Write OWNER/NAME.") from error

    published = content.gather_content(options.run, options.repo, options.include, options.results)
    width = max(map(len, published.files))
    for name in sorted(published.files):
        print(f"{name:<{width}}  {published.size(name):>15,} bytes")
    total = sum(map(published.size, published.files))
    print(f"{len(published.files)} files, {total:,} bytes, of {content.model_of(options.run)}")
    for note in published.notes:
        print(note)
    if published.free_text:
        print("Free text in run_config.yaml, the manifest and the card; check that it may be public:")
    for line in published.free_text:
        print(f"    {line:.200}")
    if options.folder is not None:
        published.write(options.folder)
        print(f"Written: {options.folder}")
    if options.yes:
        print(hub.upload(published, options.repo, public=options.public))
    else:
        kind = "public" if options.public else "private"
        print(f"Nothing was sent. With --yes these files are published as {options.repo}, {kind}.")


if __name__ == "__main__":
    run(main)
