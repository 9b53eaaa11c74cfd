"""Which file of a checkpoint directory holds which tensor. The headers decide; the index settles doubts."""

import os
from collections.abc import Mapping
from pathlib import Path

from actors.model.model_folder import MAX_INDEX_BYTES, ModelFolder
from actors.model.quantization import is_kv_scale
from actors.model.safetensors_file import SafetensorsFile, TensorInfo
from actors.model.stacked_experts import by_expert
from kernels_integration.errors import CheckpointError, shown

INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class CheckpointFiles:
    """Open files and `tensors` by released name. What is wrong is collected in `problems`, never raised.

    With an index, the files that it names are read; others only for tensors that are in none of those.
    Without one, all *.safetensors are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = ModelFolder(path)
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.has_unknown_tensors = False
        """A file cannot be read and no index tells what is in it."""
        self.reported: set[str] = set()
        """Tensors that are missing with a file that `problems` names."""
        self._open: dict[str, SafetensorsFile] = {}
        self._unreadable: set[str] = set()
        try:
            self._locate()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, file: str) -> SafetensorsFile:
        return self._open[file]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def missing_file_of(self, prefix: str) -> str | None:
        """The problem with the files that should hold tensors of this prefix; None where all are there."""
        if not any(name.startswith(prefix) for name in self.reported):
            return None
        return "; ".join(self.problems)

    def _locate(self) -> None:
        listed = self._list_files()
        index = self._read_index()
        named = set(listed) if index is None else set(index.values()) & set(listed)
        holders = self._hold(sorted(named))
        strays = [name for name in index or {} if name not in holders]
        others = sorted(set(listed) - named)
        if strays and others:
            found = self._hold(others)
            holders |= {name: found[name] for name in strays if name in found}
        for name, infos in holders.items():
            self._choose(name, infos, index or {})
        if index is None:
            self.has_unknown_tensors = bool(self._unreadable)
        else:
            self._report_strays(index, [name for name in strays if name not in holders], set(listed))
        self._expand()

    def _list_files(self) -> list[str]:
        try:
            names = self._folder.names()
        except CheckpointError as error:
            self.problems.append(str(error))
            return []
        files = [name for name in names if name.endswith(".safetensors")]
        if not files:
            self.has_unknown_tensors = True
            pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
            refused = f"; it holds {', '.join(pickles[:3])}, but" if pickles else ":"
            self.problems.append(
                f"{self.path} holds no *.safetensors{refused} pickle files (*.bin, *.pt, *.pth) are never "
                "opened, because loading one can execute code: convert the checkpoint to safetensors"
            )
        return files

    def _read_index(self) -> dict[str, str] | None:
        """None without an index, and where it is broken."""
        file = self.path / INDEX_FILE
        try:
            content = self._folder.read_object(INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None
        if content is None:
            return None
        index = content.get("weight_map")
        if not isinstance(index, dict):
            self.problems.append(
                f"{file} cannot be read as a safetensors index: weight_map is {shown(index)}; it must be an "
                "object of file names by tensor"
            )
            return None
        for name, at in index.items():
            if not isinstance(at, str) or os.path.basename(at) != at or not at.endswith(".safetensors"):
                self.problems.append(
                    f"{file} says that tensor {name} is in {shown(at)}; it must be a *.safetensors file "
                    "beside it"
                )
                return None
        return index

    def _hold(self, names: list[str]) -> dict[str, list[TensorInfo]]:
        """Open files; the tensors that they hold."""
        holders: dict[str, list[TensorInfo]] = {}
        for name in names:
            try:
                file = self._open[name] = SafetensorsFile(self.path / name)
            except CheckpointError as error:
                self.problems.append(str(error))
                self._unreadable.add(name)
                continue
            self.problems += file.problems
            for tensor, info in file.tensors.items():
                holders.setdefault(tensor, []).append(info)
        return holders

    def _choose(self, name: str, infos: list[TensorInfo], index: Mapping[str, str]) -> None:
        """Of several files the one that the index names; one alone is right even if the index errs."""
        said = index.get(name)
        match = next((info for info in infos if info.file == said), infos[0])
        if match.file != said and len(infos) > 1:
            files = " and in ".join(info.file for info in infos)
            fix = f"correct {INDEX_FILE}" if index else f"add {INDEX_FILE}"
            self.problems.append(f"tensor {name} is in {files} of {self.path}; keep one, or {fix}")
        elif match.file != said and index:
            where = f"in {said}" if said else "nowhere"
            self.notes.append(f"{INDEX_FILE} says that {name} is {where}; it is read from {match.file}")
        self.tensors[name] = match

    def _report_strays(self, index: Mapping[str, str], strays: list[str], listed: set[str]) -> None:
        self.reported.update(strays)
        absent = sorted({index[name] for name in strays} - listed)
        if absent:
            self.problems.append(
                f"{self.path} lacks files that {INDEX_FILE} names: {', '.join(absent)}; download them again"
            )
        known = set(absent) | self._unreadable
        self.problems += [
            f"{INDEX_FILE} says that tensor {name} is in {index[name]}, but no file holds it; download it"
            for name in strays
            if index[name] not in known
        ]

    def _expand(self) -> None:
        """Stacked experts under the names that a model asks for; scales that no weight needs left out."""
        stored, self.tensors = self.tensors, {}
        unused = [name for name in stored if is_kv_scale(name)]
        if unused:
            self.notes.append(
                f"{len(unused)} scales of an FP8 KV cache, such as {unused[0]}, are not used: "
                "--kv-cache-dtype fp8_ds_mla takes its scales from the values"
            )
        for name, info in stored.items():
            if is_kv_scale(name):
                continue
            for released, part in by_expert(name, info):
                if released in self.tensors:
                    stack = part.stored_as or self.tensors[released].stored_as
                    self.problems.append(
                        f"tensor {released} of {self.path} is stored by itself and within {stack}; keep one"
                    )
                self.tensors[released] = part
