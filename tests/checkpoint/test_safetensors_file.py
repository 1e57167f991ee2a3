import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from v4flash.checkpoint.safetensors_file import DTYPES, SafetensorsFile, write_atomically, write_safetensors
from v4flash.errors import CheckpointError


def every_dtype() -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = rng.integers(0, 256, 6 * dtype.itemsize).astype(np.uint8)
        tensors[f"t.{name}"] = name, raw.view(dtype).reshape(2, 3)
    tensors["scalar"] = "F32", np.float32(1.5).reshape(())
    tensors["nothing"] = "BF16", np.zeros((0, 4), ml_dtypes.bfloat16)
    return tensors


def write_raw(path, header, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_returns_bit_for_bit(tmp_path):
    tensors = every_dtype()
    write_safetensors(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.tensors.keys() == tensors.keys()
    for name, (dtype, array) in tensors.items():
        read = file.tensor(name)
        assert (read.dtype, read.shape) == (DTYPES[dtype], array.shape)
        assert read.tobytes() == array.tobytes()


def test_agrees_with_the_safetensors_library_in_both_directions(tmp_path):
    arrays = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "i": np.array([-1, 2**40]),
        "u": np.array([[7]], np.uint8),
    }
    save_file(arrays, tmp_path / "theirs.safetensors")
    theirs = SafetensorsFile(tmp_path / "theirs.safetensors")
    write_safetensors(
        tmp_path / "ours.safetensors",
        {"f": ("F32", arrays["f"]), "i": ("I64", arrays["i"]), "u": ("U8", arrays["u"])},
    )
    ours = load_file(tmp_path / "ours.safetensors")
    for name, array in arrays.items():
        for read in (theirs.tensor(name), ours[name]):
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)


def test_payload_and_scale_bytes_have_their_published_meaning(tmp_path):
    write_safetensors(
        tmp_path / "a.safetensors",
        {"w": ("F8_E4M3", np.array([0x38], np.uint8)), "s": ("F8_E8M0", np.array([120], np.uint8))},
    )
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert float(file.tensor("w")[0]) == 1.0
    assert file.tensor("s").dtype == np.uint8


def test_mapped_tensors_cannot_be_written(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"w": ("F32", np.ones(2, np.float32))})
    with pytest.raises(ValueError, match="read-only"):
        SafetensorsFile(tmp_path / "a.safetensors").tensor("w")[0] = 2


@pytest.mark.parametrize(
    ("cut", "lost", "short"),
    [(1, "b", "1 bytes short"), (16, "b", "16 bytes short"), (17, "a", "17 bytes short")],
)
def test_a_truncated_file_names_missing_bytes_and_first_lost_tensor(tmp_path, cut, lost, short):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("F32", np.ones(4, np.float32)), "b": ("F32", np.ones(4, np.float32))})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=f"{short}.*first lost tensor: {lost}"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"empty \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
            "Git LFS pointer, not the weights",
        ),
        (b"\x10\x00\x00", "ends inside its header"),
        (struct.pack("<Q", 100) + b"{}", r"ends inside its header \(10 bytes, 98 or more lost\)"),
        (b"<html>not here</html>", "not a safetensors file"),
        (struct.pack("<Q", 4) + b"{oh}", "damaged header"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_files_that_are_not_weights_are_told_apart(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"w": entry("F4")}, 4, "tensor w has dtype F4, expected one of"),
        ({"w": {"dtype": "F32"}}, 4, "damaged header entry for tensor w"),
        ({"w": entry(shape=(-1,))}, 4, "damaged header entry for tensor w"),
        ({"w": entry(shape=(2,))}, 4, r"tensor w \(F32 \[2\]\) needs 8 bytes, its header gives it 4"),
        ({"v": entry(), "w": entry(offsets=(2, 6))}, 6, "tensor w overlaps the tensor before it"),
        ({"v": entry(), "w": entry(offsets=(8, 12))}, 12, "tensor w leaves a gap before it"),
        ({"w": entry()}, 9, "5 bytes longer than its header says"),
    ],
)
def test_headers_that_do_not_fit_the_file_are_refused(tmp_path, header, size, message):
    path = tmp_path / "a.safetensors"
    write_raw(path, header, b"\0" * size)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_a_directory_or_nothing_in_place_of_the_file(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a directory"):
        SafetensorsFile(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no file"):
        SafetensorsFile(tmp_path / "b.safetensors")


def test_an_unknown_name_is_refused(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"w": ("F32", np.ones(2, np.float32))})
    with pytest.raises(CheckpointError, match="holds no tensor v"):
        SafetensorsFile(tmp_path / "a.safetensors").tensor("v")


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, [b"old"])

    def failing():
        yield b"new"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_atomically(path, failing())
    assert path.read_bytes() == b"old"


def test_the_writer_refuses_arrays_of_another_size(tmp_path):
    with pytest.raises(ValueError, match="float32 cannot be written as BF16"):
        write_safetensors(tmp_path / "a", {"w": ("BF16", np.ones(2, np.float32))})
