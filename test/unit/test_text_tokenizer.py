"""Tokenizer folder, chat template and the incremental detokenizer against the library's own decoding."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flashspark.text import ChatTemplateError, TextTokenizer, TokenizerLoadError
from tiny_models import SPECIALS, write_tokenizer

TEXTS = ["plain", "naïve café — “quotes”", "日本語テキスト", "🎉👩‍👩‍👧 mixed é\n\ttabs", "", "a" * 50]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def merged_tokenizer() -> TextTokenizer:
    """Byte-level with merges across and inside characters, plus an ordinary added token with a space."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(TEXTS * 5, trainer)
    library.add_special_tokens([AddedToken("<|end|>", special=True)])
    library.add_tokens(["two words", "Ġodd"])
    return TextTokenizer(library)


@pytest.fixture(scope="module")
def fallback_tokenizer() -> TextTokenizer:
    """The sentencepiece way: `▁` for spaces, unknown bytes as `<0xNN>`, the first space dropped."""
    pieces = ["<unk>", "▁", "a", "b", "c", "▁a", "▁bc", "é"] + [f"<0x{byte:02X}>" for byte in range(256)]
    library = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(library)


def push_in_pieces(tokenizer: TextTokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas, position = [], 0
    for size in [*sizes, len(ids)]:
        deltas.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("name", ["byte_tokenizer", "merged_tokenizer"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_ids_in_any_pieces_decode_as_a_whole(name, data, byte_tokenizer, merged_tokenizer):
    tokenizer = {"byte_tokenizer": byte_tokenizer, "merged_tokenizer": merged_tokenizer}[name]
    # Ids beyond the vocabulary too: a model's embedding may be padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    skip = data.draw(st.booleans())
    assert "".join(push_in_pieces(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_valid_text_ever_shows_half_a_character(data, byte_tokenizer, merged_tokenizer):
    text = data.draw(st.text(max_size=40).filter(lambda text: "�" not in text))
    for tokenizer in (byte_tokenizer, merged_tokenizer):
        ids = tokenizer.encode(text)
        deltas = push_in_pieces(tokenizer, ids, [1] * len(ids), False)
        assert "".join(deltas) == text
        assert not any("�" in delta for delta in deltas)
        assert deltas[-1] == ""


def test_window_detokenizer_decodes_valid_text_as_a_whole(fallback_tokenizer):
    rng = random.Random(7)
    pieces = [[5], [6], [2], [1], [7], [8 + 0xC3, 8 + 0xA9], [8 + 0xF0, 8 + 0x9F, 8 + 0x8E, 8 + 0x89]]
    for _ in range(300):
        ids = [i for _ in range(rng.randrange(12)) for i in rng.choice(pieces)]
        sizes = [rng.randrange(4) for _ in range(len(ids))]
        assert "".join(push_in_pieces(fallback_tokenizer, ids, sizes, True)) == fallback_tokenizer.decode(ids)


def test_window_detokenizer_flushes_an_unfinished_character(fallback_tokenizer):
    ids = [5, 8 + 0xF0, 8 + 0x9F]
    deltas = push_in_pieces(fallback_tokenizer, ids, [1, 1, 1], True)
    assert deltas[0] == "a"
    assert "".join(deltas) == fallback_tokenizer.decode(ids)


def test_folder_gives_ids_ends_and_template(byte_tokenizer):
    assert byte_tokenizer.vocab_size == 256 + len(SPECIALS)
    assert byte_tokenizer.eos_token_ids == (0, 2)  # generation_config.json and tokenizer_config.json
    for text in TEXTS:
        assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text
    prompt = byte_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.encode(prompt, add_special_tokens=False)[0] == 1
    assert byte_tokenizer.decode([1, 2]) == ""
    assert byte_tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerLoadError, match=r"no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ half a fi")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json cannot be loaded"):
        TextTokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(TokenizerLoadError, match=r"generation_config\.json"):
        TextTokenizer.load(tmp_path)


def set_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def test_template_sandbox_and_globals(tmp_path):
    write_tokenizer(tmp_path)
    message = [{"role": "user", "content": "<b>"}]
    for template, expected in [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<b>"}]'),
        ("{{ eos_token }}{{ strftime_now('%Y') | length }}", "<|im_end|>4"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}y{% endgeneration %}", "y"),
        ("{{ flag }}", "on"),
        ([{"name": "default", "template": "named"}], "named"),
    ]:
        set_template(tmp_path, template)
        tokenizer = TextTokenizer.load(tmp_path)
        assert tokenizer.apply_chat_template(message, template_kwargs={"flag": "on"}) == expected
    for template, reason in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ 1 / 0 }}", "failed"),
    ]:
        set_template(tmp_path, template)
        with pytest.raises(ChatTemplateError, match=reason):
            TextTokenizer.load(tmp_path).apply_chat_template(message)
    set_template(tmp_path, "{% if %}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        TextTokenizer.load(tmp_path)


def test_a_model_may_have_another_template_for_tools(tmp_path):
    write_tokenizer(tmp_path)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    set_template(tmp_path, named)
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.template_takes_tools
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "f"
    override = TextTokenizer.load(tmp_path, "{{ 'other' }}")
    assert not override.template_takes_tools
    assert override.apply_chat_template([], tools=[{"name": "f"}]) == "other"
    for template, takes in (
        ("{% if tools %}{{ tools }}{% endif %}", True),
        ("{% for tool in tools or [] %}{{ tool }}{% endfor %}", True),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{{ messages[0].tools }}", False),
    ):
        assert TextTokenizer.load(tmp_path, template).template_takes_tools is takes


def test_chat_template_override(tmp_path):
    write_tokenizer(tmp_path / "model")
    file = tmp_path / "own.jinja"
    file.write_text("from file")
    assert TextTokenizer.load(tmp_path / "model", str(file)).apply_chat_template([]) == "from file"
    assert TextTokenizer.load(tmp_path / "model", "{{ 'text' }}").apply_chat_template([]) == "text"
    with pytest.raises(TokenizerLoadError, match="--chat-template"):
        TextTokenizer.load(tmp_path / "model", "no-such-template")
    set_template(tmp_path / "model", None)
    assert not TextTokenizer.load(tmp_path / "model").has_chat_template
