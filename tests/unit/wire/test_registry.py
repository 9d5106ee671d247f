"""The schema, its enums and the command registry agree with each other; every command survives a round trip."""

from __future__ import annotations

import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from braid.wire import messages, types
from braid.wire.commands import FIELDS, Command, decode, encode
from braid.wire.schema import pulsar_pb2 as schema
from braid.wire.types import FROM_CLIENT, CommandType

ENUMS: list[tuple[type[IntEnum], Any]] = [
    (types.CommandType, schema.BaseCommand.Type),
    (types.ServerError, schema.ServerError),
    (types.AuthMethod, schema.AuthMethod),
    (types.AckType, schema.CommandAck.AckType),
    (types.ValidationError, schema.CommandAck.ValidationError),
    (types.TopicsMode, schema.CommandGetTopicsOfNamespace.Mode),
    (types.LookupResult, schema.CommandLookupTopicResponse.LookupType),
    (types.PartitionsResult, schema.CommandPartitionedTopicMetadataResponse.LookupType),
    (types.InitialPosition, schema.CommandSubscribe.InitialPosition),
    (types.SubType, schema.CommandSubscribe.SubType),
    (types.ResourceType, schema.CommandTopicMigrated.ResourceType),
    (types.CompressionType, schema.CompressionType),
    (types.KeySharedMode, schema.KeySharedMode),
    (types.ProducerAccessMode, schema.ProducerAccessMode),
    (types.ScalableConsumerType, schema.ScalableConsumerType),
    (types.SchemaType, schema.Schema.Type),
    (types.SegmentState, schema.SegmentState),
    (types.TxnAction, schema.TxnAction),
]


@pytest.mark.parametrize(("ours", "generated"), ENUMS, ids=[ours.__name__ for ours, _ in ENUMS])
def test_enums_equal_the_schema(ours: type[IntEnum], generated: Any) -> None:
    def plain(name: str) -> str:
        return "none" if name == "NoSchema" else name.replace("_", "").lower()

    assert {plain(name): value for name, value in generated.items()} == {plain(one.name): one.value for one in ours}


BRAID_COMMANDS = (
    *("NewSubTxn", "DecideTxn", "RenewTxn", "BeginSink", "GetSink"),
    *("DescribeSegments", "FindIndex", "FetchEntries", "MoveCursor", "ReportPlaces"),
)
BRAID_MESSAGES = {f"Command{name}{end}" for name in BRAID_COMMANDS for end in ("", "Response")} | {
    "ElderLane",
    "PrunedSegment",
    "ReportedPlace",
    "SegmentIndexes",
}
BRAID_FIELDS = {f"BaseCommand.{name[0].lower()}{name[1:]}{end}" for name in BRAID_COMMANDS for end in ("", "Response")}


def test_schema_is_complete() -> None:
    file = schema.DESCRIPTOR
    fields = [field for message in file.message_types_by_name.values() for field in message.fields]
    braid_only = [field.full_name for field in fields if field.number >= 1000]
    assert len(file.message_types_by_name) == 117
    assert len(set(file.message_types_by_name) - BRAID_MESSAGES) == 93
    known = [message for name, message in file.message_types_by_name.items() if name not in BRAID_MESSAGES]
    assert len([field for message in known for field in message.fields if field.number < 1000]) == 510
    assert sorted({name.removeprefix("braid.wire.schema.") for name in braid_only} - BRAID_FIELDS) == [
        "BrokerEntryMetadata.txn_least_bits",
        "BrokerEntryMetadata.txn_most_bits",
        "CommandCloseProducer.is_settled",
        "CommandNewTxn.is_decider",
        "CommandProducerSuccess.elders",
        "CommandScalableTopicSubscribe.hands_over",
        "CommandScalableTopicSubscribe.initial_position",
        "CommandScalableTopicSubscribe.is_leaving",
        "CommandScalableTopicSubscribe.is_relayed",
        "CommandScalableTopicSubscribe.registration_epoch",
        "CommandScalableTopicSubscribe.registration_number",
        "CommandScalableTopicSubscribe.says_goodbye",
        "CommandScalableTopicSubscribeResponse.registration_epoch",
        "CommandScalableTopicSubscribeResponse.registration_number",
        "CommandSubscribe.resets",
        "FeatureFlags.supports_braid",
        "ScalableAssignedSegment.place",
        "ScalableConsumerAssignment.is_partial",
        "ScalableConsumerAssignment.owed",
        "ScalableConsumerAssignment.resets",
        "ScalableConsumerAssignment.term",
        "ScalableTopicDAG.incarnation",
        "ScalableTopicDAG.routing",
    ]
    assert set(file.message_types_by_name) == set(messages.__all__)


def test_generated_code_is_that_of_the_schema(tmp_path: Path) -> None:
    compiled = tmp_path / "schema.bin"
    proto = "braid/wire/schema/pulsar.proto"
    root = Path(schema.__file__).parents[3]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={root}", f"--descriptor_set_out={compiled}", proto]
    subprocess.run(protoc, check=True)
    (file,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")  # derived; generated code leaves it out
    assert file == FileDescriptorProto.FromString(schema.DESCRIPTOR.serialized_pb)


def test_a_command_field_has_the_number_of_its_type() -> None:
    numbers = {field.name: field.number for field in schema.BaseCommand.DESCRIPTOR.fields if field.name != "type"}
    assert {name: int(kind) for kind, name in FIELDS.items()} == numbers
    assert sorted(numbers.values()) == [*range(2, 41), *range(50, 69), *range(70, 82), *range(1000, 1020)]


def test_directions() -> None:
    assert CommandType.SEND in FROM_CLIENT
    assert CommandType.CLOSE_CONSUMER in FROM_CLIENT
    assert CommandType.MESSAGE not in FROM_CLIENT
    assert not [kind for kind in FROM_CLIENT if kind.name.endswith(("_RESPONSE", "_SUCCESS", "_UPDATE")) and kind != 37]


def filled(cls: Any, depth: int = 0) -> Any:
    """A message with every field set (recursion stops at the second level of optional sub-messages)."""
    made = cls()
    for field in cls.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth > 1 and not field.is_required:
                continue
            value = filled(getattr(messages, field.message_type.name), depth + 1)
            if field.is_repeated:
                getattr(made, field.name).append(value)
            else:
                getattr(made, field.name).CopyFrom(value)
            continue
        value = {
            FieldDescriptor.CPPTYPE_STRING: b"\xff\x00" if field.type == FieldDescriptor.TYPE_BYTES else "téxt",
            FieldDescriptor.CPPTYPE_BOOL: True,
            FieldDescriptor.CPPTYPE_DOUBLE: 1.5,
        }.get(field.cpp_type, field.number)
        if field.type == FieldDescriptor.TYPE_ENUM:
            value = field.enum_type.values[-1].number
        if field.is_repeated:
            getattr(made, field.name).extend([value, value])
        else:
            setattr(made, field.name, value)
    return made


@pytest.mark.parametrize("kind", list(CommandType), ids=[kind.name for kind in CommandType])
def test_every_command_makes_a_round_trip(kind: CommandType) -> None:
    cls = type(getattr(messages.BaseCommand(), FIELDS[kind]))
    body = filled(cls)
    frame = encode(kind, body)
    envelope = messages.BaseCommand(**{"type": kind, FIELDS[kind]: body})
    assert frame[8:] == envelope.SerializeToString()
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert int.from_bytes(frame[4:8], "big") == len(frame) - 8
    assert decode(frame[8:]) == Command(kind, body)
