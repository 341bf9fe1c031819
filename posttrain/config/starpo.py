"""The keys of train_phase3_starpo.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from posttrain.config.algorithm import AlgorithmSection, FilterSection, presets
from posttrain.config.data import Source, kinds_filled_in
from posttrain.config.shared import (
    CONTEXT,
    CONTEXT_TURNS,
    MAX_CONTEXT,
    PRESETS,
    STARPO_RATES,
    Context,
    EnvSection,
    Field,
    ModelSection,
    ProtocolSection,
    Section,
    Temperature,
    TrainingRun,
    different_titles,
    env_by_name,
    hint,
    templates_are_shown,
    turns_where_counted,
    whole_context_with_tools,
    wrong,
)
from posttrain.config.suites import BUDGET, TrainingSuites
from posttrain.config.yaml_file import read_yaml


class TrainingEnvSection(EnvSection):
    after: str | None = Field(
        "a curriculum: train in it once the environment of this name or label, earlier in the list, is won often"
        " enough; null trains in it from the start",
        None,
    )
    after_success: float = Field("how often: success on the validation levels of an evaluation", 0.5, gt=0, le=1)
    difficulty: Literal["auto"] | None = Field(
        "auto: half of its groups play again a level of the last 16 steps that 20 to 80 % of its episodes won (arXiv"
        " 2010.03934), or, where none of them won, whose rewards differed; null always draws new levels",
        None,
    )


TrainingEnv = Annotated[TrainingEnvSection, BeforeValidator(env_by_name)]


class RolloutSection(Section):
    groups: int = Field("levels played in one step", 32, ge=1, le=65536)
    num_generations: int = Field("episodes of each level, which form a group", 8, ge=1, le=65536)
    refill: int = Field(
        "further levels that a step may play, until `groups` groups have episodes of different rewards (DAPO's dynamic"
        " sampling) and one that is trained on; groups whose rewards are all equal teach nothing",
        0,
        ge=0,
        le=65536,
    )
    temperature: Temperature = Field("of the rollouts; 1 is the policy itself", 1.0, gt=0)
    max_completion_length: int = Field("new tokens in one turn", 64, ge=1)
    max_context: int = Field(MAX_CONTEXT, 1024, ge=8)
    context: Context = Field(CONTEXT, "full")
    context_turns: int | None = Field(CONTEXT_TURNS, None, ge=1)
    slots: int | None = Field(
        "conversations that run at the same time; null takes as many as fit into the memory, at most all of a step",
        None,
        ge=1,
    )
    engine: Literal["auto", "slots", "replay", "vllm", "vllm_server"] = Field(
        "slots keeps the KV cache across turns, replay reads them again, vllm is vLLM where it is installed (TRL's"
        " use_vllm), vllm_server is `vllm serve` at the addresses in `servers`",
        "auto",
    )
    cuda_graphs: bool | None = Field(
        "on a GPU the slot engine replays its decoding steps as CUDA graphs (verl's enforce_eager=False), and keeps the"
        " memory of the KV cache during updates; null does so where both fit",
        None,
    )
    servers: list[str] = Field(
        "engine vllm_server: addresses, each with http:// and its port (TRL's vllm_server_base_url)", []
    )
    max_staleness: int = Field(
        "with servers: by how many updates the weights that play may be behind those that learn (TRL's async_grpo); 0"
        " plays and learns in turn, more plays the next steps while one is learned from",
        0,
        ge=0,
        le=64,
    )
    vllm_gpu_memory_utilization: float = Field("engine vllm: its share of the GPU's memory (TRL's)", 0.3, gt=0, lt=1)

    _context = model_validator(mode="after")(turns_where_counted)

    @model_validator(mode="after")
    def _room(self) -> RolloutSection:
        if self.groups * self.num_generations > 2**20:
            episodes = self.groups * self.num_generations
            raise wrong(f"groups times num_generations is {episodes} episodes in a step: at most {2**20}")
        if self.refill and self.max_staleness:
            raise wrong("`rollout.refill` looks at a step's rewards before it plays more: leave out `max_staleness`")
        if self.max_completion_length >= self.max_context:
            raise wrong("max_completion_length (one turn) must be smaller than max_context (all of its context)")
        return self

    @model_validator(mode="after")
    def _servers(self) -> RolloutSection:
        elsewhere = self.engine == "vllm_server"
        if elsewhere and not self.servers:
            raise wrong("`rollout.engine: vllm_server` needs `rollout.servers`, a list of addresses")
        if self.servers and not elsewhere:
            raise wrong("`rollout.servers` is for vLLM's servers: write `rollout.engine: vllm_server` as well")
        for url in self.servers:
            from envs.web import is_address

            if not is_address(url):
                raise wrong(f"`rollout.servers` has {url!r}, which is not an address such as http://localhost:8000")
        known = {url.rstrip("/").replace("//localhost:", "//127.0.0.1:") for url in self.servers}
        if len(known) < len(self.servers):
            raise wrong("`rollout.servers` names a server twice")
        if self.max_staleness and not elsewhere:
            raise wrong("`rollout.max_staleness` above 0 needs `rollout.engine: vllm_server`")
        return self

    @property
    def conversations(self) -> int:
        """Return how many are sampled at a time: `slots`, or all of a step where no plan has chosen it."""
        return self.slots or self.groups * self.num_generations


class DistillationSection(Section):
    """Generalized knowledge distillation (Agarwal et al., arXiv 2306.13649), twice. With `sources` lmbda 0 and beta
    0: the teacher is the model that phase 3 starts from, rows are its own answers, and the divergence is KL(teacher ||
    policy). With `teacher` lmbda 1 and beta 1: the teacher is that model, rows are the policy's episodes, and the
    divergence is KL(policy || teacher)."""

    sources: Annotated[list[Source], kinds_filled_in("prompts")] = Field(
        "where the prompts come from, as in phases 1 and 2, `rows` of each; answers that stand there are not read;"
        " left out where there is a `teacher` alone",
        [],
    )
    decontaminate: bool = Field("as `data.decontaminate` of phases 1 and 2, for the prompts", True)
    coef: float = Field("weight of the KL in the loss; 0 only measures it", 1.0, ge=0)
    batch_size: int = Field("rows that are read in an optimizer step, over all processes", 32, ge=1)
    max_new_tokens: int = Field("longest answer", 256, ge=1)
    eval_rows: int = Field("rows held out, on which the KL is measured at each evaluation", 128, ge=1)
    teacher: str | None = Field(
        "a model with the same tokenizer, by folder or Hub name, which the policy follows on the tokens that it samples"
        " in the rollouts (on-policy distillation, arXiv 2306.13649)",
        None,
        min_length=1,
    )
    teacher_coef: float = Field(
        "weight of KL(policy || teacher) in the loss (arXiv 2306.13649, beta 1); 0 only measures it", 1.0, ge=0
    )
    reward: bool = Field(
        "false: the teacher instead of the reward (arXiv 2306.13649): advantages are 0, and every group is trained on,"
        " whatever its rewards",
        True,
    )

    @model_validator(mode="after")
    def _has_a_teacher(self) -> DistillationSection:
        if self.teacher is None and not self.sources:
            raise wrong(
                "nothing is distilled: write `sources` (prompts, which keep the policy near the model that it starts"
                " from), `teacher` (another model), or `distillation: null`"
            )
        if not self.reward and not (self.teacher and self.teacher_coef):
            raise wrong(
                "`reward: false` leaves the learning to a teacher: write `teacher: NAME`, and a `teacher_coef` above 0"
            )
        return self


class StarPOTrainerSection(Section):
    learning_rate: float | None = Field(
        "peak learning rate; null takes what fits model.tuning: 1e-6 for full, 1e-5 for lora and qlora", None, gt=0
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "after the warm-up; the others fall towards 0, warmup_stable_decay in the last quarter", "constant"
    )
    warmup_steps: int = Field("steps over which the learning rate rises from 0", 0, ge=0)
    max_steps: int = Field("rollouts, each followed by its update", 200, ge=1)
    micro_batch_tokens: int | None = Field(
        "token budget of one forward and backward; changes memory, not the result; null takes what fits into it",
        None,
        ge=1,
    )
    ddp_timeout: int = Field(
        "seconds that processes wait for one that does not answer, before the run ends", 3600, ge=1
    )
    optim: Literal["adamw_torch", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "optimizer; 8 bits need bitsandbytes", "adamw_torch"
    )
    adam_beta1: float = Field("decay of the first moment", 0.9, ge=0, lt=1)
    adam_beta2: float = Field("decay of the second moment", 0.999, ge=0, lt=1)
    weight_decay: float = Field("decoupled weight decay", 0.0, ge=0)
    max_grad_norm: float = Field("gradients are clipped to this norm", 1.0, gt=0)
    bf16: bool | None = Field(
        "compute in bfloat16 (autocast; weights stay float32); null does so where the GPU or CPU has it in hardware",
        None,
    )
    gradient_checkpointing: bool | None = Field(
        "recompute activations to save memory; null does so where less than four contexts would fit without", None
    )
    torch_compile: bool | None = Field(
        "compile the decoder's layers, each by itself (TRL's key, there for the whole model); null does so on a GPU,"
        " except with qlora",
        None,
    )


class EvaluationSection(Section):
    every: int = Field(
        "steps between two evaluations, which cannot be switched off: they choose what is saved; one is before the"
        " first step",
        10,
        ge=1,
    )
    episodes: int = Field(
        "validation levels of each environment, which choose the best checkpoint", 128, ge=1, le=1_000_000
    )
    temperature: Temperature = Field("of these episodes; 0 is greedy", 0.5, ge=0)
    final_episodes: int = Field(
        "test levels of each environment after the last step, for the best checkpoint", 256, ge=1, le=1_000_000
    )
    suites: TrainingSuites = Field(
        "a few held-out prompts on what phases 1 and 2 taught, answered at each evaluation: is it forgotten?",
        TrainingSuites(),
    )
    budget: float | None = Field(BUDGET, 0.1, gt=0, le=1)


class CheckpointSection(Section):
    every: int = Field("steps between two checkpoints (TRL's save_steps)", 10, ge=1)
    keep: int = Field("checkpoints kept beside the best (TRL's save_total_limit)", 2, ge=1)


class DiagnosticsSection(Section):
    every: int = Field(
        "steps between two measurements of RAGEN-2's mutual information between thoughts and their prompts; 0 never"
        " measures it",
        10,
        ge=0,
    )
    pairs: int = Field("thoughts that are scored under as many prompts, in each of two scopes", 32, ge=2, le=65536)
    early_stop: bool = Field(
        "end the run at an alarm that says further steps are wasted, as RAGEN's early stopping does", True
    )


class TranscriptSection(Section):
    every: int = Field("steps between two sets of transcripts (whole episodes, as TRL's log_completions)", 10, ge=1)


class StarPORun(TrainingRun):
    """Phase 3; `model.name_or_path` is the folder phase 2 saved."""

    rates = STARPO_RATES
    preset_sections = ("algorithm", "protocol")

    envs: list[TrainingEnv] = Field("the environments that are played, mixed", min_length=1)
    protocol: ProtocolSection = Field("turns, answer format and penalties", ProtocolSection())
    rollout: RolloutSection = Field("how episodes are sampled", RolloutSection())
    algorithm: AlgorithmSection = Field("how episodes become an update", AlgorithmSection())
    distillation: DistillationSection | None = Field(
        "what keeps the policy from forgetting: the KL to the model it starts from, on that model's answers to old"
        " prompts (generalized knowledge distillation, arXiv 2306.13649); and another model that teaches; null leaves"
        " both out",
        None,
    )
    trainer: StarPOTrainerSection = Field("the optimizer, under TRL's names", StarPOTrainerSection())
    evaluation: EvaluationSection = Field("held-out levels", EvaluationSection())
    checkpoint: CheckpointSection = Field("what is kept to resume from", CheckpointSection())
    transcripts: TranscriptSection = Field("whole episodes to read", TranscriptSection())
    diagnostics: DiagnosticsSection = Field("what is watched, and what an alarm may do", DiagnosticsSection())

    @model_validator(mode="after")
    def _envs_fit(self) -> StarPORun:
        different_titles(self.envs)
        whole_context_with_tools(self.envs, self.rollout.context, "rollout.context")
        templates_are_shown(self.envs, self.protocol, "protocol")
        programs = [env.title for env in self.envs if env.options.get("agent")]
        if programs and self.rollout.max_staleness:
            raise wrong(f"{programs[0]} is played by a program, which cannot play ahead: leave out `max_staleness`")
        titles = [env.title for env in self.envs]
        for n, env in enumerate(self.envs):
            if env.after is not None and env.after not in titles[:n]:
                raise wrong(
                    f"envs.{n}.after is {env.after}, which is not an environment before it in the list"
                    f" ({', '.join(titles[:n]) or 'it is the first'}){hint(env.after, titles[:n])}"
                )
        return self

    @model_validator(mode="after")
    def _all_groups_teach(self) -> StarPORun:
        """Keep every group where a teacher replaces the reward."""
        if self.rewarded:
            return self
        algorithm = self.algorithm
        written = [key for key in FilterSection.model_fields if algorithm.written(f"filter.{key}")]
        if written and algorithm.filter.strategy != "none":
            raise wrong(
                f"`algorithm.filter` ({', '.join(written)}) chooses groups by what their rewards can teach, and with"
                " `distillation.reward: false` every group teaches: write `algorithm.filter: {strategy: none}`, or"
                " leave it out"
            )
        if self.rollout.refill:
            raise wrong(
                "`rollout.refill` plays until groups have different rewards, and with `distillation.reward: false`"
                " every group teaches: write `rollout.refill: 0`"
            )
        if algorithm.critical:
            raise wrong(
                f"`algorithm.advantage: {algorithm.advantage}` trains a critic on rewards, which `distillation.reward:"
                " false` does not read: write `algorithm.advantage: grpo`"
            )
        if ":" in algorithm.advantage:
            raise wrong(
                f"`algorithm.advantage: {algorithm.advantage}` reads rewards, and with `distillation.reward: false`"
                " nothing is learned from them: leave it out"
            )
        every_group = algorithm.model_copy(update={"filter": FilterSection(keep_zero=True)})
        object.__setattr__(self, "algorithm", every_group)
        return self

    @model_validator(mode="after")
    def _no_contradiction(self) -> StarPORun:
        algorithm, chosen, samples = self.algorithm, self.algorithm.filter, self.rollout.num_generations
        if samples == 1 and self.rewarded:
            if algorithm.compares_groups:
                raise wrong(
                    f"`algorithm.advantage: {algorithm.advantage}` compares the episodes of a group, and"
                    " `rollout.num_generations: 1` makes groups of one: play at least 2, or take reinforce_pp or gae"
                )
            if "reward_" in chosen.metric and (chosen.strategy != "none" or not chosen.keep_zero):
                raise wrong(
                    "groups of one have no std of rewards: with `rollout.num_generations: 1` write"
                    " `algorithm.filter: {strategy: none, keep_zero: true}`"
                )
        if chosen.strategy == "top_k_abs" and chosen.value > self.rollout.groups:
            raise wrong(
                f"`algorithm.filter.value` ({chosen.value:g}) is more groups than are played ({self.rollout.groups},"
                " `rollout.groups`)"
            )
        if chosen.strategy == "top_k_abs" and chosen.value < len(self.envs):
            raise wrong(
                f"`algorithm.filter.value` ({chosen.value:g}) is fewer groups than there are environments"
                f" ({len(self.envs)}), each of which keeps at least one: write at least {len(self.envs)}"
            )
        most, parts = chosen.most(self.rollout.groups, len(self.envs)), algorithm.minibatches
        if parts > most and algorithm.written("minibatches"):
            raise wrong(
                f"`algorithm.minibatches` ({parts}) is more than the groups that a step can keep ({most}): write less,"
                " or play more (`rollout.groups`)"
            )
        if algorithm.critic.warmup_steps >= (steps := self.trainer.max_steps):
            raise wrong(
                f"`algorithm.critic.warmup_steps` ({algorithm.critic.warmup_steps}) leaves no step to the policy: write"
                f" less than `trainer.max_steps` ({steps})"
            )
        if algorithm.critical and algorithm.critic.kind == "separate" and self.model.tuning == "qlora":
            raise wrong(
                "a separate critic trains a copy, which four-bit weights cannot be: `algorithm.critic.kind: shared`"
            )
        if self.rollout.engine in ("vllm", "vllm_server") and self.model.tuning == "qlora":
            raise wrong(
                f"`rollout.engine: {self.rollout.engine}` is not given four-bit weights: write `rollout.engine: auto`,"
                " or `model.tuning: lora`"
            )
        if self.rollout.max_staleness and self.algorithm.importance_sampling_clip_max is None:
            raise wrong(
                "`rollout.max_staleness` above 0 learns from episodes of older weights: weight their tokens, with"
                " `algorithm.importance_sampling_clip_max: 2`"
            )
        if self.distillation and self.remembers and self.distillation.max_new_tokens + 8 > self.rollout.max_context:
            raise wrong(
                f"`distillation.max_new_tokens` ({self.distillation.max_new_tokens}) leaves no prompt any room in"
                f" `rollout.max_context` ({self.rollout.max_context}), which holds both: lower it"
            )
        return self

    @property
    def remembers(self) -> bool:
        """Return whether the model that the run starts from is distilled, on its answers to old prompts."""
        return self.distillation is not None and bool(self.distillation.sources)

    @property
    def rewarded(self) -> bool:
        """Return whether the policy learns from rewards; otherwise from a teacher alone."""
        return self.distillation is None or self.distillation.reward

    @property
    def teacher(self) -> ModelSection | None:
        """Return the model of `distillation.teacher`, in the precision of the computation; None without one."""
        if self.distillation is None or self.distillation.teacher is None:
            return None
        dtype = "bfloat16" if self.trainer.bf16 else "float32" if self.model.dtype == "auto" else self.model.dtype
        attention = self.model.attn_implementation
        return ModelSection(name_or_path=self.distillation.teacher, dtype=dtype, attn_implementation=attention)

    @property
    def can_share_prefixes(self) -> bool:
        """Return whether an update can read common prefixes once.

        Not with recomputed layers or a separate critic; compiled layers read whole rows faster.
        """
        own_trunk = self.algorithm.critical and self.algorithm.critic.kind != "shared"
        return not self.trainer.gradient_checkpointing and not self.trainer.torch_compile and not own_trunk

    @classmethod
    def preset_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        algorithm = values.get("algorithm")
        name = algorithm.get("preset") if isinstance(algorithm, dict) else None
        return read_yaml(PRESETS / f"{name}.yaml") if name in presets() else {}
