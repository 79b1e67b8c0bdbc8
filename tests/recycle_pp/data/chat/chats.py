"""Tokenizers with chat templates, and conversations, for tests."""

import json
import random
from pathlib import Path

from recycle_pp.state.hf_tokenizer import _byte_symbols

# ChatML, as in Qwen2, without and with marks of the assistant's text
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# like Qwen3: keeps only the thoughts of the last answer
THINKS = "{% if loop.last and message.role == 'assistant' %}<think>{% endif %}{{ message.content }}"
FORGETS = CHATML.replace("{{ message.content }}", THINKS)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if 'tool_calls' in message %}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END, VOCABULARY = 256, 257, 258


def tokenizer(folder: Path, template: str = CHATML) -> Path:
    """Saves a byte tokenizer with two special tokens, as transformers does. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {"id": number, "content": content, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for number, content in ((START, "<|im_start|>"), (END, "<|im_end|>"))
    ]
    model = {"type": "BPE", "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())}, "merges": []}
    files = {
        "tokenizer.json": {
            "version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
            **({"chat_template": template} if template else {}),
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def conversation(seed: int, turns: int = 2, words: int = 6) -> list[dict[str, str]]:
    """A random conversation. Questions have at most `words` words, and each answer is the reversed question."""
    source, known = random.Random(seed), ["red", "green", "blau", "gelb", "möwe", "one two"]
    messages = []
    for _ in range(turns):
        words_of = source.choices(known, k=source.randint(1, words))
        messages += [
            {"role": "user", "content": " ".join(words_of)},
            {"role": "assistant", "content": " ".join(reversed(words_of))},
        ]
    return messages


def jsonl(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def many(path: Path, count: int = 60) -> str:
    """Writes a file with `count` conversations of one to three turns. Returns its path."""
    return jsonl(path, [{"messages": conversation(seed, turns=1 + seed % 3)} for seed in range(count)])
