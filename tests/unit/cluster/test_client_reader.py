"""Messages of a Generate call to text, against the tokenizer's own decoding."""

import hashlib
import io
import shutil
import zipfile
from pathlib import Path

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import cluster
from actors.requests import TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.client.reader import CallReader
from cluster.client.tokenizer_download import from_chunks
from cluster.gateway.tokenizer_bundle import CHUNK_BYTES, TokenizerBundle
from cluster.tokenizer import Tokenizer, load_tokenizer
from kernels_integration.errors import CheckpointError, LatentrayError
from kernels_integration.philox import choice_seed

TINY_DSA = Path(cluster.__file__).parent / "assets" / "tiny-dsa"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY_DSA)


def chunk(*token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=token_ids))


def complete(*token_ids: int, **fields: object) -> pb.GenerateResponse:
    fields = {"finish_reason": "length", "output_ids": token_ids} | fields
    return pb.GenerateResponse(complete=pb.GenerateComplete(**fields))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_join_to_the_text_and_tokens(tokenizer, size):
    ids = tokenizer.encode("naïve café - 漢字 and 🙂 too", add_special_tokens=False)
    reader = CallReader(SamplingParams(), tokenizer.backend, (1,))
    cut = [ids[i : i + size] for i in range(0, len(ids), size)]
    pieces = [reader.piece(chunk(*part), None) for part in cut]
    pieces.append(reader.piece(complete(*ids, completion_tokens=len(ids)), 9))
    assert "".join(p.text for p in pieces) == tokenizer.decode(ids)
    assert [t for p in pieces for t in p.token_ids] == ids
    assert [p.finish_reason for p in pieces] == [None] * len(cut) + ["length"]
    assert (pieces[-1].usage.completion_tokens, pieces[-1].seed) == (len(ids), 9)


def test_the_text_ends_before_the_stop_string(tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    params = SamplingParams(stop=("two",))
    streamed = CallReader(params, tokenizer.backend, ())
    end = complete(*ids, finish_reason="stop", matched_stop_str="two")
    texts = [streamed.piece(chunk(i), None).text for i in ids] + [streamed.piece(end, None).text]
    whole = CallReader(params, tokenizer.backend, ()).completion("r", [end], 7)
    assert "".join(texts) == whole.text == "one "
    assert (whole.matched_stop, whole.seed, whole.token_ids) == ("two", 7, tuple(ids))


def test_a_token_that_ends_the_stream_is_counted_but_no_text(tokenizer):
    ids = tokenizer.encode("yes no", add_special_tokens=False)
    for params, last in (
        (SamplingParams(skip_special_tokens=False), 1),
        (SamplingParams(stop_token_ids=(ids[0],), ignore_eos=True), ids[0]),
    ):
        reader = CallReader(params, tokenizer.backend, (1,))
        body = ids[1:]
        pieces = [
            reader.piece(chunk(*body, last), None),
            reader.piece(complete(*body, last, finish_reason="stop"), None),
        ]
        assert "".join(p.text for p in pieces) == tokenizer.decode(body)
        assert pieces[0].token_ids == (*body, last)


def test_without_a_tokenizer_there_are_ids_only():
    reader = CallReader(SamplingParams(), None, ())
    assert reader.piece(chunk(5, 6), None).text == ""
    assert reader.completion("r", [complete(5, 6)], None).token_ids == (5, 6)


def test_logprobs():
    message = pb.OutputLogProbs(token_ids=[5, 6], token_logprobs=[-1, -2])
    reader = CallReader(SamplingParams(logprobs=0), None, ())
    bare = reader.piece(
        pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[5, 6], output_logprobs=message)), None
    )
    assert bare.logprobs == (TokenLogprob(token_id=5, logprob=-1), TokenLogprob(token_id=6, logprob=-2))
    for token in (5, 6):
        message.top_logprobs.append(pb.TopLogProbs(token_ids=[token, 9], values=[-1, -3]))
    full = reader.completion("r", [complete(5, 6, output_logprobs=message)], None)
    assert [entry.top for entry in full.logprobs] == [((5, -1), (9, -3)), ((6, -1), (9, -3))]


def test_choices_have_texts_and_seeds_of_their_own(tokenizer):
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in ("one 漢", "two 🙂"))
    params = SamplingParams(n=2)
    reader = CallReader(params, tokenizer.backend, ())
    texts = ["", ""]
    for position in range(max(len(one), len(two))):  # their characters are cut at different places
        for index, ids in enumerate((one, two)):
            part = pb.GenerateStreamChunk(token_ids=ids[position : position + 1], index=index)
            texts[index] += reader.piece(pb.GenerateResponse(chunk=part), None).text
    ends = [complete(*ids, index=index) for index, ids in ((1, two), (0, one))]
    pieces = [reader.piece(end, 7) for end in ends]
    assert [p.index for p in pieces] == [1, 0]
    assert [texts[p.index] + p.text for p in pieces] == ["two 🙂", "one 漢"]
    assert [p.seed for p in pieces] == [choice_seed(7, 1), 7]
    whole = CallReader(params, tokenizer.backend, ()).completion("r", ends, 7)
    assert (whole.text, [other.text for other in whole.others]) == ("one 漢", ["two 🙂"])
    assert (whole.seed, whole.others[0].seed) == (7, choice_seed(7, 1))


def test_a_finish_reason_that_hides_a_failure_is_an_error():
    reader = CallReader(SamplingParams(), None, ())
    with pytest.raises(LatentrayError, match="abort"):
        reader.piece(complete(finish_reason="abort"), None)


def test_the_tokenizer_comes_whole_or_not_at_all(tokenizer):
    chunks = list(TokenizerBundle(tokenizer.files).chunks())
    assert all(len(c.data) == CHUNK_BYTES for c in chunks[:-1])
    fetched = from_chunks(chunks)
    text = "What is the capital of France?"
    assert fetched.encode(text) == tokenizer.encode(text)
    chat = [{"role": "user", "content": text}]
    assert fetched.render_chat(chat) == tokenizer.render_chat(chat)
    for broken in (chunks[1:], chunks[:-1], []):
        with pytest.raises(LatentrayError, match="sha256"):
            from_chunks(broken)


def test_clients_get_the_template_that_the_server_was_given(tmp_path):
    (tmp_path / "mine").write_text("{{ messages[0].content }}!")
    server = load_tokenizer(TINY_DSA, chat_template=tmp_path / "mine")
    fetched = from_chunks(list(TokenizerBundle(server.files).chunks()))
    assert fetched.render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def made(folder):
    folder.mkdir()
    return folder


def checkpoint_with(folder, *, without=(), **files):
    """The bundled tokenizer's files in a folder of their own, some left out, others added."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if name not in without:
            shutil.copy(TINY_DSA / name, folder)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def test_clients_render_what_the_server_renders_wherever_its_templates_lie(tmp_path):
    template = "<|bos|>TOOLS {{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = checkpoint_with(tmp_path, additional_chat_templates__tool_use_dot_jinja=template)
    server = load_tokenizer(folder)
    client = from_chunks(list(TokenizerBundle(server.files).chunks()))
    chat, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "f"}}]
    assert server.render_chat(chat, tools=tools).startswith("<|bos|>TOOLS")
    assert client.render_chat(chat, tools=tools) == server.render_chat(chat, tools=tools)
    assert client.render_chat(chat) == server.render_chat(chat)
    given = load_tokenizer(folder, chat_template=folder / "additional_chat_templates" / "tool_use.jinja")
    client = from_chunks(list(TokenizerBundle(given.files).chunks()))
    assert client.render_chat(chat) == given.render_chat(chat) == "<|bos|>TOOLS nullHi"


def test_clients_can_load_what_a_server_serves_without_a_tokenizer_config(tmp_path):
    server = load_tokenizer(checkpoint_with(tmp_path, without=["tokenizer_config.json"]))
    client = from_chunks(list(TokenizerBundle(server.files).chunks()))
    assert client.encode("Hi") == server.encode("Hi")
    chat = [{"role": "user", "content": "Hi"}]
    assert client.render_chat(chat) == server.render_chat(chat)


def test_what_clients_get_is_what_was_parsed(tmp_path):
    """A link to a file that only the server's user may read is refused; unread files are not handed out."""
    folder = checkpoint_with(made(tmp_path / "model"), secret_dot_json='{"key": "sesame"}')
    server = load_tokenizer(folder)
    data = TokenizerBundle(server.files).data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "config.json", "tokenizer_config.json"}
    (tmp_path / "token").write_text('{"key": "sesame"}')
    (folder / "special_tokens_map.json").symlink_to(tmp_path / "token")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json leads to .*token"):
        load_tokenizer(folder)


@pytest.mark.slow
def test_a_tokenizer_that_unpacks_to_gigabytes_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(9):
            archive.writestr(f"{index}.json", bytes(2**26))
    data = buffer.getvalue()
    chunk = common_pb2.GetTokenizerChunk(data=data, sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(LatentrayError, match="unpacks to 603979776 bytes; at most 536870912"):
        from_chunks([chunk])
