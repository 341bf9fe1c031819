"""Is our ConvGPT the published one, and does every feature the pipeline leans on leave its numbers alone?"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from trl.trainer.utils import add_fused_lm_head

from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM, ConvGPTModel

GOLDEN = Path(__file__).parents[1] / "fixtures" / "convgpt_golden" / "tied"
PAD, EXACT = 1, 1e-5


def tiny(tied: bool, attention: str = "sdpa", **changes) -> Any:
    torch.manual_seed(3)
    options = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,  # large enough for positions and masks to matter in the logits
        "tie_word_embeddings": tied,
    }
    config = ConvGPTConfig(**(options | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, ConvGPTForCausalLM)
    return model.eval()


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.numel() > 0
    return (a - b).abs().max().item()


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the published architecture


def test_published_configuration_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = ConvGPTForCausalLM(ConvGPTConfig(conv_kernel_h_w=5))
    assert sum(parameter.numel() for parameter in model.parameters()) == 163_952_769
    assert (model.config.emb_dim_factor, model.config.emb_factor, model.config.transformer_dim) == (36, 3, 144)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_agrees_with_the_published_modelling_code(attention):
    golden = json.loads((GOLDEN / "golden.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(GOLDEN, attn_implementation=attention)
    with torch.no_grad():
        assert gap(model(torch.tensor(golden["input_ids"])).logits, torch.tensor(golden["logits"])) < 1e-4
        padded = {name: torch.tensor(value) for name, value in golden["left_padded"].items()}
        expected, real = padded.pop("logits"), padded["attention_mask"].bool()
        assert not real.all()
        assert gap(model(**padded).logits[real], expected[real]) < 1e-4
        del padded["position_ids"]  # derived from the mask
        assert gap(model(**padded).logits[real], expected[real]) < 1e-4
    prompt = torch.tensor(golden["greedy"]["prompt"])
    new = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert new.tolist() == golden["greedy"]["new_tokens"]


@pytest.mark.parametrize(("hidden", "kernel"), [(16, 3), (64, 2), (256, 5), (1296, 5)])
def test_the_stage_is_convolution_then_average_pooling(hidden, kernel):
    torch.manual_seed(0)
    config = ConvGPTConfig(
        hidden_size=hidden, conv_kernel_h_w=kernel, vocab_size=8, num_hidden_layers=1, initializer_range=0.3
    )
    stage = ConvGPTModel(config).conv
    embeds = torch.randn(2, 3, hidden, requires_grad=True)
    side, pool = config.emb_dim_factor, config.emb_factor
    square = functional.pad(embeds.view(2, 3, side, side).transpose(1, 2), (kernel - 1, 0))
    convolved = functional.conv2d(square, stage.weight).transpose(1, 2)
    literal = functional.avg_pool2d(convolved, pool).flatten(-2)
    ours = stage(embeds)
    assert ours.shape[-1] == config.transformer_dim
    scale = literal.abs().max().item()
    assert gap(ours, literal) < 1e-5 * scale
    direction = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (embeds, stage.weight), direction),
        torch.autograd.grad(literal, (embeds, stage.weight), direction),
        strict=True,
    ):
        assert gap(a, b) < 1e-5 * b.abs().max().item()


def test_state_dict_names(tied, tmp_path):
    model = tiny(tied, num_hidden_layers=1)
    layer = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")] + ["norm1.weight", "norm2.weight"]
    expected = {"model.embed_tokens.weight", "model.conv.weight", "model.norm_emb.g", "model.norm.weight"}
    expected |= {f"model.layers.0.{name}" for name in layer} | {"lm_head.weight"}
    if tied:
        expected |= {f"model.scale_up.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert set(model.state_dict()) == expected
    assert tuple(model.model.conv.weight.shape) == (8, 8, 1, 5) and tuple(model.model.norm_emb.g.shape) == (1,)
    assert model.lm_head.weight.shape[1] == (64 if tied else 64 // model.config.emb_factor**2)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


# --- config files


def published_style_folder(folder: Path) -> Path:
    """The golden checkpoint with a config.json as the Hub has it, and code beside it that must not run."""
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "ConvGPTConfig", "AutoModelForCausalLM": "ConvGPTForCausalLM"}
    config |= {
        "auto_map": {auto: f"remote_code.{name}" for auto, name in names.items()},
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "use_moe_lm_head": False,
        "laplace_attn_fn": False,
        "conv_filters": 12,
        "scale": 4,
        "is_causal": False,
        "max_seq_length": 99,
        "never_heard_of": {"a": [1]},
        "layer_types": ["full_attention"] * 24,  # what the published class computes from its defaults
        "emb_dim_factor": 36,
        "emb_factor": 3,
        "transformer_dim": 144,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "remote_code.py").write_text("raise AssertionError('remote code ran')\n")
    return folder


@pytest.mark.parametrize("trust", [None, False, True])
def test_auto_map_and_unknown_fields_load_without_running_remote_code(tmp_path, trust):
    folder = published_style_folder(tmp_path / "hub")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    assert type(config) is ConvGPTConfig
    assert (config.emb_dim_factor, config.emb_factor, config.transformer_dim) == (16, 2, 64)
    assert len(config.layer_types) == config.num_hidden_layers == 3
    assert config.never_heard_of == {"a": [1]}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    assert type(model) is ConvGPTForCausalLM
    golden = json.loads((GOLDEN / "golden.json").read_text())
    with torch.no_grad():
        assert gap(model(torch.tensor(golden["input_ids"])).logits, torch.tensor(golden["logits"])) < 1e-4
    model.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert "auto_map" not in saved and "is_causal" not in saved and saved["num_experts"] == 8


def test_auto_model_loads_the_backbone():
    model = AutoModel.from_pretrained(GOLDEN)
    assert type(model) is ConvGPTModel
    assert gap(model.embed_tokens.weight, AutoModelForCausalLM.from_pretrained(GOLDEN).lm_head.weight) == 0


@pytest.mark.parametrize("hidden", [1, 9, 65, 257, 625, 1300])
def test_a_hidden_size_that_is_no_square_or_cannot_be_pooled_is_refused(hidden):
    with pytest.raises(ValueError, match=rf"must be a perfect square.*; {hidden} is not") as error:
        ConvGPTConfig(hidden_size=hidden)
    for word in str(error.value).split("work:")[1].replace("and", "").rstrip(".").split():
        assert math.isqrt(int(word)) ** 2 == int(word)
        assert ConvGPTConfig(hidden_size=int(word)).hidden_size == int(word)  # what the message offers is accepted


def test_impossible_heads_and_positions_are_refused():
    with pytest.raises(ValueError, match="multiple of num_key_value_heads"):
        ConvGPTConfig(num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ValueError, match="'yarn' is not supported"):
        ConvGPTConfig(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4})


def test_rope_theta_survives_a_round_trip_and_is_used(tmp_path):
    model = tiny(True, rope_theta=50.0)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 50.0
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_theta == 50.0
    ids = tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        again.config.rope_theta = 10000.0
        assert gap(again(ids).logits, model(ids).logits) > 1e-3


# --- saving and loading


def test_save_and_load_gives_bit_identical_logits(tied, tmp_path):
    model, ids = tiny(tied), tokens(2, 17)
    model.save_pretrained(tmp_path)
    names = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().keys()
    assert names == model.state_dict().keys()
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(3):  # an uninitialised buffer would differ from load to load
            answer: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
            loaded, info = answer
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert torch.equal(loaded.eval()(ids).logits, expected)


def test_built_on_the_meta_device_and_filled_by_hand(tied):
    model, ids = tiny(tied), tokens(2, 9)
    with torch.device("meta"):
        empty = ConvGPTForCausalLM(model.config)
    assert not list(empty.named_buffers())  # nothing that a state dict would not bring
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def test_initialisation_covers_every_parameter(tied):
    model = tiny(tied, initializer_range=0.02)
    assert model.model.norm_emb.g.item() == 1.0
    assert torch.all(model.model.norm.weight == 1)
    assert torch.all(model.model.embed_tokens.weight[PAD] == 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert 0.01 < parameter.std().item() < 0.03, name


def test_embeddings_can_be_resized(tied):
    model, ids = tiny(tied), tokens(1, 5)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(70)
        assert gap(model(ids).logits[..., :61], before) < EXACT
    assert model.lm_head.weight.shape[0] == model.config.vocab_size == 70


# --- padding, masks and caches


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Three conversations of 12, 8 and 5 tokens in 14 slots: padding left, right and in the middle."""
    rows = [tokens(1, length, seed=length)[0] for length in (12, 8, 5)]
    slots = [list(range(2, 14)), [1, 2, 5, 6, 7, 9, 10, 13], [0, 3, 4, 8, 11]]
    ids, mask = torch.full((3, 14), PAD), torch.zeros(3, 14, dtype=torch.long)
    for row, (content, where) in enumerate(zip(rows, slots, strict=True)):
        ids[row, where], mask[row, where] = content, 1
    ids[mask == 0] = 7  # the padding's content must not matter either
    return ids, mask, rows


def alone(model: ConvGPTForCausalLM, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_anywhere_changes_nothing(tied, attention):
    model = tiny(tied, attention)
    ids, mask, rows = padded_batch()
    expected = alone(model, rows)
    assert gap(model(ids, attention_mask=mask).logits[mask.bool()], expected) < EXACT
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert gap(model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()], expected) < EXACT
    wrong = torch.arange(14).expand(3, -1)  # the holes do matter: the test would notice
    assert gap(model(ids, attention_mask=mask, position_ids=wrong).logits[mask.bool()], expected) > 1e-3


@torch.no_grad()
def test_padding_on_the_right_needs_no_mask(tied, monkeypatch):
    model = tiny(tied)
    ids = tokens(3, 14)
    ends = torch.tensor([14, 5, 9])
    mask = (torch.arange(14) < ends[:, None]).long()
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = model(ids, attention_mask=mask).logits[mask.bool()]
    assert masks and all(given is None for given in masks)
    assert gap(found, alone(model, [row[:end] for row, end in zip(ids, ends, strict=True)])) < EXACT
    packed = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]]).expand(3, -1)  # positions are the caller's
    asked = [
        tiny(tied, kind)(ids, attention_mask=torch.ones_like(ids), position_ids=packed) for kind in ("sdpa", "eager")
    ]
    assert gap(asked[0].logits, asked[1].logits) < EXACT
    masks.clear()
    model(ids, attention_mask=mask.flip(1))
    assert masks and all(given is not None for given in masks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chunks", [[14], [1] * 14, [6, 1, 1, 4, 2]], ids=["prefill", "tokens", "mixed"])
@torch.no_grad()
def test_cached_batched_decoding_changes_nothing(tied, attention, kind, chunks):
    model = tiny(tied, attention)
    ids, mask, rows = padded_batch()
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=20)
    logits, start = [], 0
    for size in chunks:
        end = start + size
        out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        start = end
    # Fourteen steps in another order of sums: 1.08e-5 on one kind of processor.
    assert gap(torch.cat(logits, 1)[mask.bool()], alone(model, rows)) < 2 * EXACT


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_boolean_mask_of_ones_own_with_a_hand_made_cache(tied, attention):
    """A sampler's way: (rows, 1, query, key) mask, explicit positions, its own cache layers, the backbone alone."""
    model = tiny(tied, attention)
    ids, mask, rows = padded_batch()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    causal = torch.ones(14, 14, dtype=torch.bool).tril()
    allowed = (causal & mask.bool()[:, None, :])[:, None]
    expected = alone(model, rows)
    plain = model(ids, attention_mask=allowed, position_ids=positions, use_cache=False).logits
    assert torch.isfinite(plain).all()  # also where a padding slot may see nothing at all
    assert gap(plain[mask.bool()], expected) < EXACT

    cache, hidden = Cache(layers=[DynamicLayer() for _ in range(3)]), []
    for start, end in ((0, 9), (9, 10), (10, 14)):
        out = model.model(
            input_ids=ids[:, start:end],
            position_ids=positions[:, start:end],
            attention_mask=allowed[:, :, start:end, :end],
            past_key_values=cache,
            use_cache=True,
        )
        assert out.past_key_values is cache
        hidden.append(out.last_hidden_state)
    assert gap(model.lm_head(torch.cat(hidden, 1))[mask.bool()], expected) < EXACT


@torch.no_grad()
def test_packed_rows_do_not_see_each_other(tied):
    model = tiny(tied)
    rows = [tokens(1, length, seed=length)[0] for length in (6, 4, 9)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
    assert gap(packed, alone(model, rows)) < EXACT


@torch.no_grad()
def test_eager_attention_gives_maps(tied):
    ids, mask, _ = padded_batch()
    maps = tiny(tied, "eager")(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    assert len(maps.attentions) == 3 and maps.attentions[0].shape == (3, 4, 14, 14)
    assert len(maps.hidden_states) == 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_sliding_window_from_a_layer_on(attention):
    model = tiny(False, attention, sliding_window=4, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert tiny(False, sliding_window=None, max_window_layers=0).config.layer_types == ["full_attention"] * 3
    ids = tokens(2, 12)
    full, windowed = tiny(False, attention)(ids).logits, model(ids).logits
    assert gap(full[:, :4], windowed[:, :4]) < EXACT and gap(full[:, 4:], windowed[:, 4:]) > 1e-3
    assert gap(tiny(False, attention, sliding_window=4, max_window_layers=3)(ids).logits, full) == 0
    # By hand: with all layers windowed, the last token sees (4 - 1) * 3 + 1 tokens and no more.
    narrow = tiny(False, attention, sliding_window=4, max_window_layers=0)
    changed = ids.clone()
    changed[:, 1] = (ids[:, 1] + 1) % 61
    assert gap(narrow(ids).logits[:, 11], narrow(changed).logits[:, 11]) == 0
    changed = ids.clone()
    changed[:, 2] = (ids[:, 2] + 1) % 61
    assert gap(narrow(ids).logits[:, 11], narrow(changed).logits[:, 11]) > 0
    cache = DynamicCache(config=model.config)
    steps = [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(12)]
    assert gap(torch.cat(steps, 1), windowed) < EXACT


@torch.no_grad()
def test_logits_to_keep_selects_and_scales_up_only_what_it_keeps(tied):
    model, ids = tiny(tied), tokens(3, 9)
    full, seen = model(ids).logits, []
    if model.model.scale_up is not None:
        model.model.scale_up.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel()))
    per_row = torch.tensor([[0, 3], [8, 2], [5, 5]])
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[0, 2:5] = mask[2, 8] = True
    for keep, expected in (
        (1, full[:, -1:]),
        (4, full[:, -4:]),
        (torch.tensor([2, 7]), full[:, [2, 7]]),
        (per_row, full.gather(1, per_row[..., None].expand(-1, -1, 61))),
        (mask, full[mask]),
    ):
        assert gap(model(ids, logits_to_keep=keep).logits, expected) < EXACT
        assert gap(model.lm_head(model.model(ids, logits_to_keep=keep).last_hidden_state), expected) < EXACT
    assert seen == ([3, 3, 12, 12, 6, 6, 6, 6, 4, 4] if tied else [])


@torch.no_grad()
def test_embeddings_instead_of_ids(tied):
    model, ids = tiny(tied), tokens(2, 6)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


# --- generating and training


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate_left_padded_batch(tied, cache):
    model = tiny(tied)
    rows = [tokens(1, length, seed=length) for length in (9, 4, 6)]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    batch = torch.cat([functional.pad(row, (9 - row.shape[1], 0), value=PAD) for row in rows])
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    made = model.generate(batch, attention_mask=(batch != PAD).long(), **options, **how)[:, 9:]
    for row, new in zip(rows, made, strict=True):
        expected = row
        for _ in range(8):  # greedy by hand, no padding, no cache
            with torch.no_grad():
                expected = torch.cat((expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        assert new.tolist() == expected[0, row.shape[1] :].tolist()


def loss_and_gradients(model: torch.nn.Module, **arguments) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found and all(torch.isfinite(grad).all() for grad in found.values())
    return loss.item(), found


def training_batch() -> dict[str, Any]:
    ids, mask, _ = padded_batch()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(tied, reentrant):
    model = tiny(tied).train()
    loss, gradients = loss_and_gradients(model, **training_batch())
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().max() > 0 for grad in gradients.values())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    again, same = loss_and_gradients(model, **training_batch())
    assert len(runs) == 2  # it really is recomputed in the backward pass
    assert again == loss and same.keys() == gradients.keys()
    assert all(gap(same[name], gradients[name]) < EXACT for name in gradients)


def test_lora_trains_the_adapter_and_merges(tied):
    model, ids = tiny(tied), tokens(2, 8)
    with torch.no_grad():
        before = model(ids).logits
    lora = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in lora.named_parameters() if ".lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    lora.gradient_checkpointing_enable({"use_reentrant": False})
    lora.train()
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss, gradients = loss_and_gradients(lora, input_ids=ids, labels=ids, use_cache=False)
        assert all("lora_" in name for name in gradients)
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.1
    lora.eval()
    with torch.no_grad():
        tuned = lora(ids).logits
        assert gap(tuned, before) > 1e-2
        assert gap(lora.merge_and_unload()(ids).logits, tuned) < 1e-4


def test_trl_fused_head_gives_the_models_own_loss(tied):
    model = tiny(tied).train()
    batch = training_batch()
    own, gradients = loss_and_gradients(model, **batch)
    add_fused_lm_head(model)
    fused, same = loss_and_gradients(model, fused_lm_head=True, **batch)
    assert abs(fused - own) < EXACT
    assert same.keys() == gradients.keys()
    assert all(gap(same[name], gradients[name]) < 1e-4 * max(1.0, gradients[name].abs().max()) for name in gradients)


def test_fused_head_ignores_router_fields_of_the_published_config(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(published_style_folder(tmp_path / "hub"))
    ids = tokens(2, 8)
    own = model(ids, labels=ids).loss
    add_fused_lm_head(model)
    assert abs(model(ids, labels=ids, fused_lm_head=True).loss - own) < EXACT


def test_bfloat16_and_autocast_stay_close(tied):
    model, ids = tiny(tied, initializer_range=0.1), tokens(2, 12)
    with torch.no_grad():
        exact = model(ids, labels=ids).loss
        with torch.autocast("cpu", torch.bfloat16):
            assert abs(model(ids, labels=ids).loss - exact) < 0.05
        half = model.to(torch.bfloat16)(ids, labels=ids)
    assert half.logits.dtype == torch.bfloat16 and abs(half.loss - exact) < 0.05
