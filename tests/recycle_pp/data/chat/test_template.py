"""Chat templates: exactly the tokens that the assistant wrote have a loss.

This works for any template that renders the beginning of a conversation as the beginning of its whole text.
"""

import json

import numpy as np
import pytest

from recycle_pp.data.chat.conversation import Conversation, conversation_of
from recycle_pp.data.chat.template import ChatTemplate
from tests.recycle_pp.data.chat import chats


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """template(text): the byte tokenizer with this chat template. Equal templates are loaded once."""
    known = {}

    def load(text):
        if text not in known:
            known[text] = ChatTemplate(str(chats.tokenizer(tmp_path_factory.mktemp("chat") / "t", text)))
        return known[text]

    return load


def text_of(tokens):
    special = {chats.START: b"<|im_start|>", chats.END: b"<|im_end|>"}
    return b"".join(special.get(int(token)) or bytes([token]) for token in tokens).decode()


def answers(messages):
    return "".join(f"{one['content']}<|im_end|>\n" for one in messages if one["role"] == "assistant")


@pytest.mark.parametrize("text", [chats.CHATML, chats.MARKED], ids=["prefixes", "marks"])
@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_with_a_loss_are_the_answers_and_their_ends(template, text, seed):
    messages = [{"role": "system", "content": "Reverse it."}, *chats.conversation(seed, turns=3)]
    ids, counted = template(text).encode(Conversation(messages))
    assert text_of(ids) == "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    assert text_of(ids[counted]) == answers(messages)
    assert template(text).vocabulary == 256, "without the two added tokens"


@pytest.mark.parametrize("text", [chats.CHATML, chats.MARKED], ids=["prefixes", "marks"])
def test_the_date_in_a_template_is_always_the_same(template, text):
    ids, _ = template("{{ strftime_now('%d %b %Y, %f') }}" + text).encode(Conversation(chats.conversation(1)))
    assert text_of(ids).startswith("26 Jul 2024, 000000<|im_start|>user")
    with pytest.raises(ValueError, match="the chat template prints the current time, so the same data"):
        template("{{ strftime_now('%' ~ 'd') }}" + text).encode(Conversation(chats.conversation(1)))


@pytest.mark.parametrize("text", [chats.CHATML, chats.MARKED], ids=["prefixes", "marks"])
def test_a_prompt_has_no_loss_even_if_the_assistant_wrote_it(template, text):
    messages = chats.conversation(3, turns=3)
    record = {"prompt": messages[:3], "completion": messages[3:]}
    ids, counted = template(text).encode(conversation_of(record, "messages"))
    assert text_of(ids[counted]) == answers(messages[3:])
    short = conversation_of({"prompt": "one", "completion": "two"}, "messages")
    ids, counted = template(text).encode(short)
    assert text_of(ids) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    assert text_of(ids[counted]) == "two<|im_end|>\n"


def test_a_token_that_begins_before_the_answer_and_ends_in_it_has_a_loss(tmp_path):
    """For example "\\n\\n", if an answer that follows a line break begins with one."""
    folder = chats.tokenizer(tmp_path / "t")
    made = json.loads((folder / "tokenizer.json").read_text())
    break_ = next(symbol for symbol, byte in made["model"]["vocab"].items() if byte == 10)
    made["model"]["vocab"][2 * break_] = both = 256
    made["model"]["merges"] = [[break_, break_]]
    for number, token in enumerate(made["added_tokens"], 257):
        token["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(made))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    ids, counted = ChatTemplate(str(folder)).encode(Conversation(messages))
    assert ids[counted].tolist() == [both, ord("b"), 258, 10]


def test_a_template_that_changes_earlier_text_is_refused(template):
    forgets = template(chats.FORGETS)
    ids, counted = forgets.encode(Conversation(chats.conversation(0, turns=1)))
    assert counted.any() and "<think>" in text_of(ids[counted])
    with pytest.raises(ValueError, match="the text up to message 2 is not the beginning of the whole text"):
        forgets.encode(Conversation(chats.conversation(0, turns=2)))


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "assistant", "content": "a"}], "begins with the assistant"),
        ([{"role": "user", "content": 3 * [{}]}, {"role": "nobody"}], "the chat template rejects the conversation"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(template, messages, sentence):
    strict = "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('roles') }}{% endif %}{% endfor %}x"
    with pytest.raises(ValueError, match=sentence):
        template(strict).encode(Conversation(messages))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"text": "a", "prompt": "b"}, "neither 'messages' nor both 'prompt' and 'completion'; it has text, prompt"),
        ({"messages": "a"}, "'messages' is not a list of messages"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [{"from": "gpt"}]}, "'messages' is not a list of messages"),
        ({"prompt": "a", "completion": [1]}, "'completion' is not a list of messages"),
    ],
)
def test_a_record_without_a_conversation_is_refused(record, sentence):
    with pytest.raises(ValueError, match=sentence):
        conversation_of(record, "messages")


def test_a_folder_without_a_chat_template_is_refused(tmp_path):
    folder = chats.tokenizer(tmp_path / "t", template="")
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* has no chat template"):
        ChatTemplate(str(folder))


def test_the_mask_of_a_template_with_marks_equals_that_of_transformers(template):
    marked = template(chats.MARKED)
    messages = chats.conversation(9, turns=3)
    found = marked._tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, counted = marked.encode(Conversation(messages))
    assert np.array_equal(ids, found["input_ids"]) and counted.tolist() == list(map(bool, found["assistant_masks"]))
