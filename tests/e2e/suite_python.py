"""Runs the official Python client's own test-suite, unmodified, against `braid standalone`.

    make suite-python SUITE=<folder with pulsar_test.py>

The suite is not part of this repository. Its tests are taken by name, in the levels the client's needs fall into (0: no
broker, 1: produce, 2: consume, 3: readers, seek, redelivery, 4: partitions, several topics, patterns, HTTP lookup; without
test_regex_subscription, which needs non-persistent topics). They run twice on one data directory and once more after a
kill -9. Five tests leave unacknowledged or unread messages behind under fixed names and then expect to find none: they cannot
pass again on any correct broker (Pulsar 4.2.4 fails the same five). So the topics are deleted over REST between two rounds;
`--keep` leaves them, and expects exactly those five to fail from the second round on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

LEVELS: dict[int, dict[str, str]] = {
    0: {
        "pulsar_test": """test_producer_config test_consumer_config test_connect_error test_exception_inheritance
            test_client_argument_errors test_service_info_argument_errors test_auto_cluster_failover_argument_errors
            test_json_schema_encode test_keyshare_policy test_dead_letter_policy_config
            test_auto_cluster_failover_client test_service_info_provider_client""",
        "asyncio_test": "test_set_future_noop_when_future_cancelled test_set_future_noop_when_future_already_resolved",
        "schema_test": """test_simple test_type_promotion test_complex test_invalid_enum test_initialization
            test_field_type_check
            test_field_type_check_defaults test_serialize_json test_serialize_avro test_non_sorted_fields
            test_sorted_fields test_serialize_wrong_types test_defaults test_none_value test_serialize_schema_complex
            test_sub_record_set_to_none test_json_schema_encode_remove_reserved_key test_schema_array_wrong_type
            test_schema_type test_schema_definition_keys test_schema_definition_values
            test_file_descriptor_set_is_valid_base64_proto test_encode_decode_roundtrip
            test_encode_produces_protobuf_binary test_encode_decode_nested_message test_wrong_type_raises
            test_non_message_class_raises test_schema_name""",
    },
    1: {
        "pulsar_test": """test_simple_producer test_producer_send_async test_producer_is_connected test_producer_routing_mode
            test_message_argument_errors test_producer_argument_errors test_client_reference_deleted
            test_send_async_no_deadlock test_shutdown_client test_invalid_chunking_config test_listener_name_client""",
        "asyncio_test": """test_flush test_send_failure test_close_producer test_producer_is_connected test_shutdown_client
            test_create_producer_failure""",
        "debug_logger_test": "test_configure_log_level test_configure_log_to_file",
        "custom_logger_test": "test_logger_thread_leaks",
    },
    2: {
        "pulsar_test": """test_producer_send test_producer_consumer test_consumer_initial_position
            test_consumer_queue_size_is_zero
            test_message_listener test_consumer_is_connected test_consumer_argument_errors test_get_last_message_id
            test_v2_topics test_batch_receive test_message_id test_producer_consumer_zstd test_get_topic_name
            test_consumer_name test_encryption test_encryption_failure test_chunking test_acknowledge_failed
            test_deserialize_msg_id_with_topic test_null_value_message test_null_value_vs_empty_bytes
            test_null_value_with_properties test_keyshared_invalid_sticky_ranges""",
        "asyncio_test": """test_batch_end_to_end test_send_keyed_message test_consumer_cumulative_acknowledge
            test_consumer_individual_acknowledge test_unsubscribe""",
        "custom_logger_test": "test_async_func_with_custom_logger",
        "interrupted_test": "test_sigint",
    },
    3: {
        "pulsar_test": """test_reader_simple test_reader_on_last_message test_reader_on_specific_message
            test_reader_on_specific_message_with_batches test_reader_is_connected test_reader_argument_errors
            test_reader_seek_for_message_id test_reader_has_message_available test_seek test_seek_inclusive
            test_redelivery_count test_negative_acks test_dead_letter_policy test_batch_index_ack""",
        "asyncio_test": """test_consumer_negative_acknowledge test_consumer_get_last_message_id test_async_dead_letter_policy
            test_seek_message_id test_seek_timestamp test_reader_simple test_reader_on_last_message
            test_reader_on_specific_message test_reader_has_message_available test_reader_seek""",
        "reader_test": "test_has_message_available_after_seek test_seek_latest_message_id",
    },
    4: {
        "pulsar_test": """test_reader_on_partitioned_topic test_topics_consumer test_topics_pattern_consumer
            test_get_topics_partitions test_get_partitioned_topic_name test_message_router test_v2_topics_http""",
        "asyncio_test": "test_get_topics_partitions test_get_partitioned_topic_name test_multi_topic_consumer",
    },
}


LEAVE_STATE_BEHIND = {
    "test_consumer_initial_position",
    "test_encryption",
    "test_get_last_message_id",
    "test_batch_index_ack",
    "test_reader_simple",
}


def run_module(folder: Path, module_name: str, names: list[str]) -> int:
    """Child process: run the named tests of one file of the suite."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(module_name, folder / f"{module_name}.py")
    if spec is None or spec.loader is None:
        sys.exit(f"{folder} has no {module_name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    wanted = set(names)
    suite = unittest.TestSuite()

    def take(tests: unittest.TestSuite) -> None:
        for test in tests:
            if isinstance(test, unittest.TestSuite):
                take(test)
            elif test.id().rpartition(".")[2] in wanted:
                wanted.discard(test.id().rpartition(".")[2])
                suite.addTest(test)

    take(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(suite)
    for name in wanted:
        print(f"MISSING {module_name}.{name}")
    failed = [test.id().rpartition(".")[2] for test, _ in [*result.failures, *result.errors]]
    print("FAILED", *failed)
    bad = len(failed) + len(wanted)
    print(f"COUNT {result.testsRun - len(failed)} {bad}")
    return 1 if bad else 0


class Broker:
    """One `braid standalone` process on the suite's fixed ports."""

    def __init__(self, data_dir: Path, brokers: int) -> None:
        self._data_dir = data_dir
        self._brokers = brokers
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        braid = Path(sys.executable).parent / "braid"
        command = [str(braid), "standalone", "--data-dir", str(self._data_dir), "--port", "6650", "--http-port", "8080"]
        command += ["--brokers", str(self._brokers)]
        environment = {**os.environ, "BRAID__BROKER__MAX_MESSAGE_SIZE": "1024000"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        if process.stdout is None or not process.stdout.readline().startswith("ready "):
            sys.exit("the broker did not start; are ports 6650 and 8080 free?")
        return process

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def prepare() -> None:
    """The second namespace that the suite's own start-up script makes."""
    request = urllib.request.Request("http://localhost:8080/admin/v2/namespaces/public/default-2", method="PUT", data=b"{}")
    request.add_header("Content-Type", "application/json")
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as answer:
        if answer.code != 409:
            raise


def delete_topics() -> int:
    """Delete every topic the suite left in its namespace; returns how many."""
    count = 0
    for namespace in ("default", "default-2"):
        root = f"http://localhost:8080/admin/v2/persistent/public/{namespace}"
        for listing, suffix in (("/partitioned", "/partitions"), ("", "")):  # partitions go with their topic
            with urllib.request.urlopen(root + listing) as reply:
                topics = [name.rpartition("/")[2] for name in json.load(reply)]
            for topic in topics:
                delete(f"{root}/{urllib.parse.quote(topic, safe='')}{suffix}?force=true")
            count += len(topics)
    return count


def delete(url: str) -> None:
    """Delete what may belong to another broker: a redirect is followed."""
    for _hop in range(5):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).close()
        except urllib.error.HTTPError as answer:
            if answer.code != 307:
                raise
            url = answer.headers["Location"]
        else:
            return


def run_round(folder: Path, label: str, levels: list[int], only: str) -> tuple[int, set[str]]:
    """All tests once; returns how many passed and which failed."""
    passed = 0
    failed: set[str] = set()
    for level in levels:
        if level == 4:  # a test of level 1 leaves a plain topic behind under the name of a partitioned one
            delete_topics()
        for module, text in LEVELS[level].items():
            names = [name for name in text.split() if only in name]
            if not names:
                continue
            started = time.monotonic()
            command = [sys.executable, __file__, "--child", str(folder), module, *names]
            child = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            lines = child.stdout.splitlines()
            counts = [line.split()[1:] for line in lines if line.startswith("COUNT ")]
            good, bad = (int(counts[0][0]), int(counts[0][1])) if counts else (0, len(names))
            passed += good
            failed |= {
                name for line in lines if line.startswith("FAILED ") for name in line.split()[1:] if name.startswith("test_")
            }
            if bad and not failed:
                failed.add(f"{module} did not run to its end")
            print(f"{label} L{level} {module}: {good} passed, {bad} failed, {time.monotonic() - started:.0f} s", flush=True)
            if bad or child.returncode:
                print(child.stdout[-12000:], child.stderr[-6000:])
    return passed, failed


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return run_module(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path, help="the tests folder of the client's repository")
    parser.add_argument("--levels", default="0,1,2,3,4")
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="3: twice on one data directory, once after a kill -9")
    parser.add_argument("--keep", action="store_true", help="keep the topics between two rounds")
    parser.add_argument("--brokers", type=int, default=1, help="brokers in the process")
    parser.add_argument("--external", action="store_true", help="a broker is running already")
    options = parser.parse_args()
    if not (options.suite / "pulsar_test.py").exists():
        parser.error(f"{options.suite} has no pulsar_test.py; give the tests folder of the client's repository")
    levels = [int(level) for level in options.levels.split(",")]
    passed = unexpected = 0
    with tempfile.TemporaryDirectory() as data_dir:
        broker = None if options.external else Broker(Path(data_dir), options.brokers)
        prepare()
        for number in range(options.rounds):
            if number and not options.keep:
                print(f"deleted the {delete_topics()} topics of the last round, on the same data directory")
            if number == 2 and broker is not None:
                broker.kill()
                print("killed the broker with SIGKILL and started it again on the same data directory")
            good, failed = run_round(options.suite.resolve(), f"round {number + 1}", levels, options.only)
            passed += good
            expected = LEAVE_STATE_BEHIND if number and options.keep else set()
            unexpected += len(failed - expected)
            print(f"round {number + 1}: {good} passed, failed: {', '.join(sorted(failed)) or 'none'}", flush=True)
        if broker is not None:
            broker.stop()
    print(f"{passed} passed, {unexpected} failed")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
