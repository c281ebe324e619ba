"""Names that lead elsewhere, and requests that lie."""

from __future__ import annotations

import gzip

from helpers.service.service_fixtures import rollout_file

from attacks.making import Attack, attack, metadata


@attack
def a_run_in_the_file_that_climbs() -> Attack:
    return Attack(404, "run", metadata(run="../../etc"))


@attack
def a_run_in_the_file_that_is_not_registered() -> Attack:
    return Attack(404, "not registered", metadata(run="other"))


@attack
def a_run_in_the_file_with_braces() -> Attack:
    return Attack(404, "run", metadata(run="a}:queue{b"))


@attack
def a_run_in_the_query_that_climbs() -> Attack:
    return Attack(404, "run", rollout_file(), path="/rollouts?run=..%2F..%2Fetc")


@attack
def a_run_in_the_query_that_is_not_the_files() -> Attack:
    return Attack(422, "the file", metadata(run="elsewhere"), path="/rollouts?run=default")


@attack
def a_drafter_version_that_climbs() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/..%2F..%2F..%2Fetc/passwd")


@attack
def a_drafter_version_with_plain_dots() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/../../../../etc/passwd")


@attack
def a_drafter_file_with_a_zero_byte() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/v000001-00000000/model%00.safetensors")


@attack
def a_run_name_with_a_newline() -> Attack:
    return Attack(422, "run", rollout_file(), method="PUT", path="/runs/a%0Ab")


@attack
def a_gzip_body() -> Attack:
    return Attack(415, "gzip", gzip.compress(rollout_file()), headers={"Content-Encoding": "gzip"})


@attack
def a_body_of_another_type() -> Attack:
    return Attack(415, "application/x-safetensors", rollout_file(), headers={"Content-Type": "application/json"})


@attack
def a_pickle() -> Attack:
    body = b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R."
    return Attack(415, "octet-stream", body, headers={"Content-Type": "application/octet-stream"})


@attack
def a_pickle_under_our_type() -> Attack:
    return Attack(422, "length word", b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")


@attack
def a_chunked_body_without_length() -> Attack:
    body = b"5\r\nhello\r\n0\r\n\r\n"
    return Attack(411, "Content-Length", body, headers={"Transfer-Encoding": "chunked"}, announced=-1)


@attack
def no_length_at_all() -> Attack:
    return Attack(411, "Content-Length", b"", announced=-1)


@attack
def a_gigabyte_against_the_cap() -> Attack:
    return Attack(413, "the limit is", b"", announced=1 << 30)


@attack
def a_length_of_a_hundred_digits() -> Attack:
    return Attack(400, "", b"", announced=10**100)


@attack
def a_longer_announcement_than_the_file_describes() -> Attack:
    body = rollout_file()
    return Attack(422, "Content-Length says", body, announced=len(body) + 1000)


@attack
def a_shorter_announcement_than_the_file_describes() -> Attack:
    body = rollout_file()[:-1]
    return Attack(422, "Content-Length says", body)


@attack
def a_byte_more_than_announced() -> Attack:
    body = rollout_file()
    return Attack(400, "", body, announced=len(body) - 1)  # to HTTP, the last byte begins another request


@attack
def a_delete_of_the_queue() -> Attack:
    return Attack(405, "", method="DELETE")
