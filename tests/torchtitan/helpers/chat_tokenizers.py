"""Tokenizer folders for tests of chat templates: ours, with tokens and a template added."""

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.data.text.tokenizer import FolderTokenizer

TINY = Path(__file__).parents[2] / "assets" / "tokenizer"
FIRST_NEW_ID = 2048
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# A template of its own: adds a system message, trims, and marks answers for transformers.
GUEST = (
    "{%- if messages[0]['role'] != 'system' -%}{{ '[sys]Be brief.\n' }}{%- endif -%}\n"
    "{%- for message in messages %}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    "        {{- '[bot]' }}\n"
    "        {%- generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}\n"
    "        {{- '\n' }}\n"
    "    {%- else %}\n"
    "        {{- '[' + message['role'] + ']' + message['content'] + '\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '[bot]' }}{% endif %}"
)


def tokenizer_folder(folder: Path, tokens: list[str] = TOKENS, **config: Any) -> Path:
    """Write our tokenizer with more special tokens and settings to ``folder``."""
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | config
    if tokens:
        settings["added_tokens_decoder"] = {
            str(FIRST_NEW_ID + i): {"content": token, "special": True, "normalized": False}
            for i, token in enumerate(tokens)
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path) -> FolderTokenizer:
    return FolderTokenizer(str(folder))


def rendered(
    template: ChatTemplate, messages: list[Message], tools: Any = (), *, prompt: bool = False
) -> str:
    """The text of messages, and with ``prompt`` what stands before an answer."""
    said = Conversation(messages, tools)
    return template._rendered(template._program(said), said, prompt=prompt).text
