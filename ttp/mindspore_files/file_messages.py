"""The protobuf messages of MindSpore's files, as classes of the protobuf library.

Field numbers and types are those of ``node_strategy_pb2.py`` and ``checkpoint_pb2.py`` in ``mindspore/train`` (2.10).
The messages are described here again, in a separate descriptor pool, because MindSpore's generated code needs a newer
protobuf than ttp does, and registers its names for the whole process. Numbers of ranks and stages have 64 bits here, so
that absurd numbers are noticed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

BYTES = 2
"""The protobuf wire type of messages, strings and bytes."""

DIMS_MAX = 64
"""Largest number of dimensions of a tensor; numpy has no more. The product of many large ones would take minutes."""

_PACKAGE = "ttp.mindspore_files"
_MESSAGES = {
    "Ranks": {1: "repeated uint64 dim"},
    "Group": {1: "string group_name", 2: "Ranks ranks"},
    "GroupMap": {1: "repeated Group groups", 2: "Ranks replicas"},
    "Numbers": {1: "repeated int32 dim"},
    "OperatorStrategies": {1: "uint64 stage"},
    "Operator": {2: "repeated OperatorStrategies strategies"},
    "ParameterLayout": {
        1: "repeated Numbers dev_matrix",
        2: "repeated Numbers tensor_map",
        3: "repeated Numbers param_split_shape",
        5: "int32 field",
        6: "int32 opt_weight_shard_step",
        7: "int32 opt_weight_shard_size",
    },
    "Parameter": {1: "string param_name", 2: "ParameterLayout layout"},
    "StrategyMap": {2: "repeated Operator operators", 3: "repeated Parameter parameters"},
    "ValueHead": {1: "string tag"},
    "TensorHead": {1: "repeated int64 dims", 2: "string tensor_type"},
}
_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}


def _described() -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in fields.items():
            *repeated, kind, title = text.split()
            label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            field = message.field.add(name=title, number=number, label=label)
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
                if repeated:
                    field.options.packed = False  # as MindSpore writes them; both forms are read
            else:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return file


_pool = DescriptorPool()
_pool.AddSerializedFile(_described().SerializeToString())
_classes: dict[str, Any] = {
    name: GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
}


def make(kind: str, **fields: Any) -> Any:
    """Return a message with these fields. ``kind`` is a name in ``_MESSAGES``."""
    return _classes[kind](**fields)


def parse(kind: str, data: bytes | bytearray) -> Any:
    """Parse a message from its bytes. ``kind`` is a name in ``_MESSAGES``.

    Raises:
        ValueError: the bytes are malformed.
    """
    try:
        return _classes[kind].FromString(bytes(data))
    except Exception as problem:  # the class depends on the implementation of protobuf
        raise ValueError(f"it is no protobuf message of this kind ({problem})") from None


def text(data: bytes) -> str:
    """Decode UTF-8.

    Raises:
        ValueError: the bytes are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("a text is not UTF-8") from None


def varint(value: int) -> bytes:
    """Encode a number from 0 as a protobuf varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
