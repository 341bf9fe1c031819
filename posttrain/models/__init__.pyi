from . import (
    convgpt as convgpt,
    gguf_writer as gguf_writer,
    model_card as model_card,
    model_files as model_files,
    row_attention as row_attention,
)
from .chat import (
    TEMPLATE_PATH as TEMPLATE_PATH,
    Chat as Chat,
    Encoded as Encoded,
    template_text as template_text,
)
from .compiled import compile_layers as compile_layers, layers_are_compiled as layers_are_compiled
from .convgpt import (
    ConvGPTConfig as ConvGPTConfig,
    ConvGPTForCausalLM as ConvGPTForCausalLM,
    ConvGPTModel as ConvGPTModel,
    pads_on_the_right as pads_on_the_right,
)
from .forward import (
    UNFIT as UNFIT,
    Prefixes as Prefixes,
    attends_to_all as attends_to_all,
    attention_mask as attention_mask,
    backbone_states as backbone_states,
    microbatches as microbatches,
    prefix_of as prefix_of,
    text_config as text_config,
    token_logprobs as token_logprobs,
    trained_states as trained_states,
    worth_sharing as worth_sharing,
)
from .fused import Kept as Kept, fused_weights as fused_weights
from .layers import SIMPLE_FAMILIES as SIMPLE_FAMILIES, simplify_layers as simplify_layers
from .literals import Message as Message
from .loading import (
    CODE as CODE,
    adapters_in_float32 as adapters_in_float32,
    add_code as add_code,
    describe_training as describe_training,
    load as load,
    load_chat as load_chat,
    other_tokens as other_tokens,
    parameters_not_finite as parameters_not_finite,
    peft_config as peft_config,
    save as save,
    whole_again as whole_again,
)
from .model_card import commit as commit
from .model_files import errors_in_words as errors_in_words, named_by as named_by, no_bars as no_bars
from .output_layer import (
    VOCABULARY_CHUNK as VOCABULARY_CHUNK,
    head_logprobs as head_logprobs,
    kl_backward as kl_backward,
    kl_tokens as kl_tokens,
    logit_scale as logit_scale,
    reverse_kl as reverse_kl,
    soft_cap as soft_cap,
)
from .requests import (
    check_size as check_size,
    fit_context as fit_context,
    generation_config as generation_config,
    not_text as not_text,
    parse_object as parse_object,
    reason_to_refuse as reason_to_refuse,
    tools_asked as tools_asked,
)
from .tools import (
    Said as Said,
    Tools as Tools,
    nine as nine,
    openai_calls as openai_calls,
    parsed_json as parsed_json,
    plain_calls as plain_calls,
    texts_in as texts_in,
    thought_end as thought_end,
    tools_key as tools_key,
)
