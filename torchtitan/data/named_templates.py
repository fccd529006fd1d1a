"""Chat templates by name, for tokenizers without a template or models tuned in another format."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan.data.chat_template import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    ChatTemplateError,
    template_in_folder,
)
from torchtitan.data.sequences import PLAIN_TEMPLATE, Template
from torchtitan.data.text.tokenizer import FolderTokenizer

AUTO = "auto"
PLAIN = PLAIN_TEMPLATE.name
FROM_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class NamedTemplate:
    """A template of ours; ``tokens`` are its single tokens, or names of special tokens."""

    source: str
    tokens: tuple[str, ...] = ()
    reads_context: bool = False


# The two openings are the wording by which the format is known; models are trained to it.
_ALPACA = (
    r"{{- bos_token }}{% set place = namespace(opening=none) %}"
    r"{% for message in messages %}"
    r"{% if message.role == 'system' %}{% set place.opening = message.content + '\n\n' %}"
    r"{% elif message.role == 'user' %}"
    r"{% if place.opening is none and message.context %}"
    r"{{ 'Below is an instruction that describes a task, paired with an input that provides "
    r"further context. Write a response that appropriately completes the request.\n\n' }}"
    r"{% elif place.opening is none %}"
    r"{{ 'Below is an instruction that describes a task. "
    r"Write a response that appropriately completes the request.\n\n' }}"
    r"{% else %}{{ place.opening }}{% endif %}"
    r"{{ '### Instruction:\n' + message.content + '\n\n' }}"
    r"{% if message.context %}{{ '### Input:\n' + message.context + '\n\n' }}{% endif %}"
    r"{{ '### Response:\n' }}"
    r"{% elif message.role == 'assistant' %}"
    r"{{ message.content }}{{ eos_token }}{% set place.opening = '\n\n' %}"
    r"{% else %}{{ raise_exception('it has no words for role ' + message.role) }}"
    r"{% endif %}{% endfor %}"
)

_LLAMA2 = (
    r"{% set place = namespace(system='') %}{% for message in messages %}"
    r"{% if message.role == 'system' %}"
    r"{% if not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}"
    r"{% set place.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
    r"{% elif message.role == 'user' %}"
    r"{{ bos_token }}{{ '[INST] ' + (place.system + message.content) | trim + ' [/INST]' }}"
    r"{% set place.system = '' %}"
    r"{% elif message.role == 'assistant' %}"
    r"{{ ' ' + message.content | trim + ' ' + eos_token }}"
    r"{% else %}{{ raise_exception('it has no words for role ' + message.role) }}"
    r"{% endif %}{% endfor %}"
)

_LLAMA3 = (
    r"{{- bos_token }}{% for message in messages %}"
    r"{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    r"{{ message.content | trim + '<|eot_id|>' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}"
    r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHATML = (
    r"{% for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NAMED_TEMPLATES = {
    "alpaca": NamedTemplate(_ALPACA, ("eos_token",), reads_context=True),
    "llama2": NamedTemplate(_LLAMA2, ("bos_token", "eos_token")),
    "llama3": NamedTemplate(
        _LLAMA3, ("bos_token", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "chatml": NamedTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
}


def known_templates() -> tuple[str, ...]:
    """Return the values of ``data.chat_template``."""
    return (AUTO, PLAIN, FROM_TOKENIZER, *NAMED_TEMPLATES)


def chosen_template(name: str, folder: str) -> str:
    """Return the template behind "auto", the tokenizer's own or alpaca; else the name."""
    if name != AUTO:
        return name
    return "alpaca" if template_in_folder(folder) is None else FROM_TOKENIZER


def choice_told(name: str, folder: str) -> str | None:
    """Return the choice of template and its reason, for the log; None for a named template."""
    if name != AUTO:
        return None
    chosen = chosen_template(name, folder)
    why = "has one" if chosen == FROM_TOKENIZER else "has none"
    return (
        f"data.chat_template is {name!r}: taking {chosen!r}, since the tokenizer in "
        f"model.hf_assets_path ({folder!r}) {why}"
    )


def template_error(name: str, folder: str) -> str | None:
    """Return the error of ``data.chat_template``, as far as files tell, or None."""
    if name not in known_templates():
        return f"data.chat_template is {name!r}; known: {', '.join(known_templates())}"
    if name not in (AUTO, FROM_TOKENIZER) or not Path(folder).is_dir():
        return None  # upstream's tokenizer says what is wrong with the folder
    try:
        source = template_in_folder(folder)
    except ChatTemplateError as error:
        return str(error)
    if source is None and name == FROM_TOKENIZER:
        return (
            f"data.chat_template is {name!r}, and model.hf_assets_path ({folder!r}) has no chat "
            f"template: neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}; choose one of "
            f"{', '.join((AUTO, PLAIN, *NAMED_TEMPLATES))}"
        )
    return None


def build_chat_template(name: str, tokenizer: BaseTokenizer, folder: str) -> Template:
    """Return the template named by ``data.chat_template``, if the tokenizer suits."""
    if name == PLAIN:
        return PLAIN_TEMPLATE
    if message := template_error(name, folder):
        raise ChatTemplateError(message)
    if not isinstance(tokenizer, FolderTokenizer):
        raise ChatTemplateError(
            f"data.chat_template is {name!r}, which needs a Hugging Face tokenizer, and the "
            f"model's is {type(tokenizer).__name__}; set it to {PLAIN!r}"
        )
    tokens = tokenizer.special_tokens
    asked, name = name, chosen_template(name, folder)
    if name == FROM_TOKENIZER:
        source = template_in_folder(folder)
        assert source is not None  # or an error was found
        for_tools = template_in_folder(folder, "tool_use")
        template = ChatTemplate(name, source, tokens, for_tools=for_tools)
    else:
        named = NAMED_TEMPLATES[name]
        _require_tokens(asked, name, tokenizer, folder)
        template = ChatTemplate(name, named.source, tokens, reads_context=named.reads_context)
    if not template.end_of_answer():
        logger.warning(
            f"The chat template {name!r} marks no end of an answer; the model will not learn where "
            "an answer ends"
        )
    return template


def _require_tokens(asked: str, name: str, tokenizer: FolderTokenizer, folder: str) -> None:
    tokens = tokenizer.special_tokens
    missing = [
        word
        for word in NAMED_TEMPLATES[name].tokens
        if (tokens.get(word) if word.endswith("_token") else tokenizer.token_to_id(word)) is None
    ]
    if missing:
        raise ChatTemplateError(
            f"data.chat_template is {asked!r}{'' if asked == name else f', so {name!r}'}, which "
            f"needs the tokens {', '.join(missing)}, and the "
            f"tokenizer in model.hf_assets_path ({folder!r}) does not have them; choose "
            f"{PLAIN if asked == AUTO else AUTO!r} or another template, or a tokenizer (and model) "
            "made for this one"
        )
