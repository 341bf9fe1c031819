from . import playing as playing
from .conversation import Answering as Answering, Conversation as Conversation, open_tools as open_tools
from .display import (
    describe_preset as describe_preset,
    describe_sampling as describe_sampling,
    escape_control_characters as escape_control_characters,
    never as never,
    note as note,
    show_beside as show_beside,
    stream as stream,
)
from .generation import DamagedModel as DamagedModel, Generator as Generator
from .keyboard import (
    ctrl_c_keeps_what_was_typed as ctrl_c_keeps_what_was_typed,
    next_message as next_message,
    one_ctrl_c as one_ctrl_c,
)
from .serve import listen as listen
from .web_chat.server import (
    chosen_password as chosen_password,
    require_gradio as require_gradio,
    serve_page as serve_page,
)
