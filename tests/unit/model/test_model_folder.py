"""Files of a checkpoint directory: which are read, and what is said of the others."""

import json
import os

import pytest

from actors.model.model_folder import MAX_DEPTH, MAX_FILE_BYTES, ModelFolder
from kernels_integration.errors import CheckpointError


def read(folder, name="config.json"):
    return ModelFolder(folder).read_object(name)


def test_a_missing_file_is_none_and_a_missing_folder_is_empty(tmp_path):
    assert read(tmp_path) is None
    folder = ModelFolder(tmp_path / "nowhere")
    assert (folder.read_text("x"), folder.names()) == (None, [])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_is_read_in_every_encoding_that_json_has(tmp_path, encoding):
    (tmp_path / "config.json").write_bytes('{"a": "漢"}'.encode(encoding))
    assert read(tmp_path) == {"a": "漢"}


def test_text_is_read_without_its_mark(tmp_path):
    (tmp_path / "t.jinja").write_bytes("\ufeffA".encode())
    assert ModelFolder(tmp_path).read_text("t.jinja") == "A"


def test_hidden_files_are_not_listed(tmp_path):
    for name in ("._model.safetensors", "model.safetensors", ".DS_Store", "b.txt"):
        (tmp_path / name).touch()
    assert ModelFolder(tmp_path).names() == ["b.txt", "model.safetensors"]
    assert ModelFolder(tmp_path).names(suffix=".safetensors") == ["model.safetensors"]


def nested(depth):
    return '{"a": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot be read as JSON"),
        (b"[]", "holds a list; it must hold one JSON object"),
        (b"\xff\x00\xff", "cannot be read as JSON"),
        (nested(MAX_DEPTH).encode(), "nested deeper than"),
        (nested(200_000).encode(), "nested deeper than"),
        (b'{"a": %s}' % (b"7" * 5000), r"the number 7777777777\.\.\. has 5000 digits"),
        (b'{"a": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": "' + b"x" * MAX_FILE_BYTES + b'"}', "is longer than"),
    ],
)
def test_bad_content_is_told_in_one_line(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json .*{words}") as caught:
        read(tmp_path)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_depth_within_the_limit_is_read(tmp_path):
    (tmp_path / "config.json").write_text(nested(MAX_DEPTH - 2))
    assert read(tmp_path) is not None


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "config.json")  # opening it the usual way would wait for a writer
    with pytest.raises(CheckpointError, match="no regular file"):
        read(tmp_path)
    os.mkdir(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="no regular file"):
        read(tmp_path, "folder")


class TestLinks:
    """A secret lies outside; a release and a Hugging Face cache are what links usually lead to."""

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "model").mkdir()
        return tmp_path / "model"

    def test_to_a_file_of_another_name_elsewhere(self, folder, tmp_path):
        (tmp_path / "secret").write_text("{}")
        (folder / "config.json").symlink_to("../secret")
        with pytest.raises(CheckpointError, match=r"config\.json leads to .*secret, which is not a file of"):
            read(folder)

    def test_to_a_device(self, folder):
        (folder / "config.json").symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match="leads to /dev/zero"):
            read(folder)

    def test_through_a_folder_that_leads_out(self, folder, tmp_path):
        (tmp_path / "private").mkdir()
        (tmp_path / "private" / "a.jinja").write_text("secret")
        (folder / "additional_chat_templates").symlink_to("../private")
        [name] = ModelFolder(folder).names("additional_chat_templates", suffix=".jinja")
        with pytest.raises(CheckpointError, match="leads to"):
            ModelFolder(folder).read_text(name)

    def test_in_a_circle(self, folder):
        (folder / "config.json").symlink_to("config.json")
        with pytest.raises(CheckpointError, match="links have no end"):
            read(folder)

    def test_to_nothing(self, folder):
        (folder / "config.json").symlink_to("absent.json")
        with pytest.raises(CheckpointError, match="No such file"):
            read(folder)

    def test_to_the_same_file_of_a_release(self, folder, tmp_path):
        (tmp_path / "release").mkdir()
        (tmp_path / "release" / "config.json").write_text('{"a": 1}')
        (folder / "config.json").symlink_to(tmp_path / "release" / "config.json")
        assert read(folder) == {"a": 1}
        (tmp_path / "release" / "config.json").unlink()
        (tmp_path / "secret").write_text("{}")
        (tmp_path / "release" / "config.json").symlink_to("../secret")
        with pytest.raises(CheckpointError, match=r"leads to .*secret"):
            read(folder)

    def test_within_the_folder(self, folder):
        (folder / "other.json").write_text('{"a": 1}')
        (folder / "config.json").symlink_to("other.json")
        assert read(folder) == {"a": 1}

    def test_of_a_hugging_face_cache(self, tmp_path):
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / "0123abcd"
        (snapshot / "additional_chat_templates").mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "blobs" / "f00d").write_text('{"a": 1}')
        (snapshot / "config.json").symlink_to("../../blobs/f00d")
        (snapshot / "additional_chat_templates" / "x.jinja").symlink_to("../../../blobs/f00d")
        link = tmp_path / "link"
        link.symlink_to(snapshot)
        for path in (snapshot, link):
            assert read(path) == {"a": 1}
            assert ModelFolder(path).read_text("additional_chat_templates/x.jinja") == '{"a": 1}'
        (repository / "secret").write_text("{}")
        (snapshot / "tokenizer_config.json").symlink_to("../../secret")
        with pytest.raises(CheckpointError, match="leads to"):
            read(snapshot, "tokenizer_config.json")


def test_what_is_read_is_what_json_says(tmp_path):
    value = {"text": "é\U0001f642", "numbers": [0, -1, 2**64, 1.5], "nothing": None, "nested": {"a": [True]}}
    (tmp_path / "config.json").write_text(json.dumps(value))
    assert read(tmp_path) == value
