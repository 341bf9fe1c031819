"""Which problems of a run can be found before it starts?  All in one UserError, before anything is written."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from posttrain import files, models
from posttrain.config import ModelSection
from posttrain.models import model_files
from posttrain.runtime import checkpoint, compat, hardware
from posttrain.types import HUB_NAME, UserError, one_line

DASHBOARDS = {
    "tensorboard": "tensorboard>=2.20,<3",
    "wandb": "wandb>=0.31,<1",
}  # dashboards that are not installed with the project


def check_run(cfg: Any, *, resume: bool = False, kept: Path | None = None, data_sets: Sequence[str] = ()) -> None:
    """Check everything that a run needs before it starts.

    Args:
        kept: the folder of the rows that the run has made of its sources; a resumed run that has them reads no source.
        data_sets: on the Hub, besides the sources of the config.

    Raises:
        UserError: something is wrong; the message lists all problems.
    """
    problems: list[str] = []

    def passes(check: Callable[[], object]) -> bool:
        try:
            check()
        except UserError as problem:
            problems.append(str(problem))
            return False
        return True

    several = getattr(cfg, "local", {}).values()
    sections = [cfg.model] if hasattr(cfg, "model") else [ModelSection(name_or_path=path) for path in several]
    data = [section for key in ("data", "distillation") if (section := getattr(cfg, key, None)) is not None]
    data += [cfg] if hasattr(cfg, "sources") else []  # posttrain.evaluation.pairs
    data_paths = [source.path for section in data for source in section.sources]
    if resume and kept is not None and (kept / checkpoint.MANIFEST).exists():
        data_paths = []
    passes(lambda: hardware.resolve_device(cfg.device))
    passes(lambda: _check_libraries(cfg))
    for path in data_paths:
        passes(lambda path=path: _check_data_path(path))
    present = [model for model in sections if passes(lambda model=model: model_files.check_source(model))]
    named: list[ModelSection] = [cfg.teacher] if getattr(cfg, "teacher", None) else []
    teachers = [one for one in named if passes(lambda one=one: model_files.check_source(one, "distillation.teacher"))]
    if passes(lambda: check_hub([*present, *teachers], [*data_paths, *data_sets])):
        for model in present:
            if passes(lambda model=model: models.load_chat(model, cfg.chat.template)):
                passes(lambda model=model: check_positions(cfg, model))
                for each in teachers:
                    passes(lambda model=model, each=each: _check_teacher(cfg, model, each))
        if hasattr(cfg, "trainer"):
            passes(lambda: _check_kernels(cfg))
            passes(
                lambda: checkpoint.needs_free_space(Path(cfg.output_dir), sum(_room(cfg, model) for model in present))
            )
    if hasattr(cfg, "output_dir"):
        passes(lambda: checkpoint.in_use(Path(cfg.output_dir), resume))
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        listed = "\n".join(f"{n}. {problem}" for n, problem in enumerate(problems, 1))
        raise UserError(f"The run cannot start, for {len(problems)} reasons:\n{listed}")


def _check_libraries(cfg: Any) -> None:
    """Raise UserError where the config needs hardware or a package that is not there."""
    if not hasattr(cfg, "trainer"):
        return
    for name, requirement in DASHBOARDS.items():
        if name in cfg.report_to and importlib.util.find_spec(name) is None:
            raise UserError(
                f"report_to={name} needs {name}, which is not installed: `pip install '{requirement}'`, or write"
                " report_to=trackio."
            )
    if "wandb" in cfg.report_to and os.environ.get("WANDB_MODE", "online") == "online":
        _check_login()
    if hardware.trainer_field(cfg, "use_liger_kernel") and importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            "trainer.use_liger_kernel=true needs the package liger-kernel, which is not installed: `pip install"
            " liger-kernel` (it needs a GPU), or leave it out."
        )
    optim, bf16 = hardware.trainer_field(cfg, "optim"), hardware.trainer_field(cfg, "bf16")
    needs_bnb = [f"trainer.optim={optim}"] if "8bit" in str(optim) else []
    needs_bnb += ["model.tuning=qlora"] if cfg.model.tuning == "qlora" else []
    if needs_bnb and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{' and '.join(needs_bnb)} needs bitsandbytes, which is not installed: `pip install bitsandbytes`, "
            "or write trainer.optim=adamw_torch and model.tuning=lora."
        )
    try:
        device = hardware.resolve_device(cfg.device)
    except UserError:  # reported already
        return
    if device.type != "cuda" and cfg.model.attn_implementation == "flex_attention":
        raise UserError(
            "model.attn_implementation=flex_attention has no backward pass without an NVIDIA GPU. Write"
            " model.attn_implementation=sdpa."
        )
    if hardware.trainer_field(cfg, "torch_compile") and device.type != "cuda":
        _check_compiler(device)
    if device.type == "mps" and cfg.model.tuning == "qlora":
        raise UserError("model.tuning=qlora needs bitsandbytes, which does not support device=mps: write lora.")
    if bf16 is True and not hardware.has_bf16(device):
        raise UserError(
            "trainer.bf16=true, but this device has no bfloat16 in hardware (a GPU since Ampere, a CPU with AVX512-BF16"
            " or AMX) and emulates it, slower than float32. Leave trainer.bf16 out (it is then on where the "
            "hardware has it) or write false."
        )


def _check_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile has no C++ compiler, which it needs for a CPU."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if device.type != "cpu" or not found:
        why = "it has not been tried on this device" if device.type != "cpu" else "there is no C++ compiler here"
        raise UserError(
            f"trainer.torch_compile=true cannot be used: {why}. Leave it out (layers are then compiled on an NVIDIA GPU"
            " alone), or on a CPU install a compiler: `sudo apt-get install g++`."
        )


def _check_login() -> None:
    """Raise UserError without a login at wandb, which would otherwise ask for a key in the middle of the run."""
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "report_to=wandb uploads to an account, and this machine is not logged in. Log in with `wandb login`, set"
            " WANDB_MODE=offline (`wandb sync` uploads later), or write report_to=trackio, which is local."
        )


def _check_kernels(cfg: Any) -> None:
    """Compile on a GPU now what training would compile after hours of data work; raise UserError where it fails."""
    try:
        device = hardware.resolve_device(cfg.device)
    except UserError:  # reported already
        return
    if device.type == "cuda":
        try_output_layer(device)


def try_output_layer(device: torch.device) -> None:
    """Try TRL's output layer on this device: a log-prob and its gradient.

    On a GPU it is a Triton kernel, which needs a C compiler and Python's headers when it first runs.

    Raises:
        UserError: it fails, or the GPU has no free memory.
    """
    try:
        hidden = torch.zeros(1, 16, device=device, requires_grad=True)
        weight, token = torch.zeros(32, 16, device=device), torch.zeros(1, dtype=torch.long, device=device)
        logprob, _ = compat.chunked_logprobs(hidden, weight, None, token, columns=32)
        logprob.sum().backward()
    except torch.OutOfMemoryError as error:
        raise UserError(f"The GPU has no free memory ({one_line(error)}). End other programs on it.") from error
    except Exception as error:  # Triton, the compiler, the driver: each fails in its own way
        raise UserError(
            f"TRL's output layer does not run on this GPU ({one_line(error)}). It is a Triton kernel, compiled when "
            "it first runs, which needs a C compiler and Python's headers: `sudo apt-get install gcc python3-dev`, or "
            "name a compiler in the environment variable CC."
        ) from error


def _check_data_path(path: str) -> None:
    """Raise UserError for a local data file that cannot be read; names on the Hub are checked with the Hub."""
    local = HUB_NAME.fullmatch(path) is None or path.endswith(files.DATA_FILES)
    if path != "embedded" and local and not os.path.exists(path):
        raise UserError(f"The data file {path} (data.sources) does not exist.")
    if os.path.isdir(path):
        raise UserError(
            f"The data source {path} (data.sources) is a folder. Name the files in it ({files.DATA_FILES_IN_WORDS}); "
            "several files are several sources."
        )
    if os.path.isfile(path):
        files.must_be_readable(path, "A data file (data.sources)")


def longest_row(cfg: Any) -> tuple[str, int] | None:
    """Return the key for the maximal tokens of a row in training, and its value; None for other configs."""
    if hasattr(cfg, "rollout"):
        return "rollout.max_context", cfg.rollout.max_context
    return ("data.max_length", cfg.data.max_length) if hasattr(cfg, "trainer") else None


def check_positions(cfg: Any, model: ModelSection) -> None:
    """Raise UserError where rows may be longer than the model's table of position embeddings."""
    longest, config = longest_row(cfg), model_files.load_config(model)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is None or not isinstance(limit, int) or longest[1] <= limit:
        return
    if model_files.learned_positions(config, model.trust_remote_code) is not None:
        raise UserError(
            f"{longest[0]}={longest[1]}, but {model.name_or_path} has an embedding for each of {limit} positions and"
            f" cannot read more tokens than that: write {longest[0]}={limit} or less."
        )


def _check_teacher(cfg: Any, model: ModelSection, teacher: ModelSection) -> None:
    """Raise UserError for a teacher whose tokens are not the model's: it could not read what was sampled."""
    own = models.load_chat(model, cfg.chat.template)
    with models.named_by("distillation.teacher"):
        other = models.load_chat(teacher, cfg.chat.template)
        rows = getattr(model_files.load_config(teacher).get_text_config(), "vocab_size", None)
    if problem := models.other_tokens(own, other):
        raise UserError(
            f"distillation.teacher={teacher.name_or_path} has another tokenizer than {model.name_or_path}: {problem}. A"
            " teacher is asked about the very tokens that the model samples: choose one of the same family, or teach by"
            " its answers instead (rows of `kind: messages` for phase 1)."
        )
    if rows is not None and rows < len(other.tokenizer):
        raise UserError(
            f"distillation.teacher={teacher.name_or_path} has {rows} rows of embeddings for a tokenizer of"
            f" {len(other.tokenizer)} tokens: it has not learnt the last ones. Choose a teacher that has, or another"
            " chat.template."
        )
    check_positions(cfg, teacher)


def check_hub(sections: list[ModelSection], data_paths: list[str]) -> None:
    """Check that every model and data set of the Hub is cached or within reach.

    Raises:
        UserError: one is not, or it does not exist, or it is gated.
    """
    repositories = [("model", model.name_or_path, model.revision) for model in sections]
    repositories += [("dataset", path, None) for path in dict.fromkeys(data_paths) if path != "embedded"]
    repositories = [one for one in repositories if HUB_NAME.fullmatch(one[1]) and not Path(one[1]).exists()]
    repositories = [one for one in repositories if not _in_cache(*one)]
    for kind, name, revision in repositories:
        try:
            HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10)
        except GatedRepoError as error:
            raise UserError(
                f"The {kind} {name} is gated: accept its terms at https://huggingface.co/{name} and log in "
                "with `hf auth login`."
            ) from error
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise UserError(f"The Hub has no {kind} {name} (or no such revision, or you may not see it).") from error
        except (OSError, compat.HTTP_ERROR) as error:
            names = ", ".join(f"{kind} {name}" for kind, name, _ in repositories)
            raise UserError(
                f"Hugging Face cannot be reached, and this run needs from it: {names} ({one_line(error)}). Connect "
                "and start again; or download them elsewhere (`hf download NAME --local-dir FOLDER`, with "
                "`--repo-type dataset` for data) and name the model's folder and the data's files "
                "(model.name_or_path=..., data.sources); or try the whole pipeline offline: `make quickstart`."
            ) from error


def _in_cache(kind: str, name: str, revision: str | None) -> bool:
    if kind == "model":
        files = ("config.json", "model.safetensors")
        return all(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "snapshots").is_dir()


def _room(cfg: Any, model: ModelSection) -> int:
    """Return the most bytes of a run's checkpoints: weights and two moments each, and one more while it is written."""
    limit = hardware.trainer_field(cfg, "save_total_limit") or 2
    kept = cfg.checkpoint.keep + 1 if hasattr(cfg, "checkpoint") else limit
    weights = 4 * _parameters(model)
    return weights + (kept + 1) * (3 * weights if model.tuning == "full" else weights // 5)


def _parameters(model: ModelSection) -> int:
    """Return how many numbers the weight files hold, by their headers or for a model not yet cached by the Hub."""
    folder = Path(model.name_or_path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model.name_or_path, "model.safetensors", revision=model.revision)
        if not isinstance(cached, str):
            try:
                content = HfApi().model_info(model.name_or_path, revision=model.revision, timeout=10).safetensors
            except (OSError, compat.HTTP_ERROR):  # perhaps cached in another form
                content = None
            return content.total if content else 0
        folder = Path(cached).parent
    return model_files.weights_held(folder)[0]
