"""Where nodes meet: who knows the secret comes in, whoever does not gets nothing and holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from shardwell.cli import gate as gates
from shardwell.cli import rendezvous as meetings
from shardwell.cli.channel import Channel, StrangerError, admit, enter, key_of
from shardwell.cli.loopback import reach_store
from shardwell.cli.rendezvous import MultiNodeRendezvous, RendezvousTimes
from shardwell.cli.rounds import NodeRank, Rounds
from shardwell.errors import ShardwellError
from shardwell.secret import job_secret
from tests.support.command import free_port

SECRET = b"of nobody but these tests"
ADDRESS = "127.0.0.1"


# --------------------------------------------------------------------------------------------------------- channels


def between(
    gate: Callable[[Channel], Coroutine[Any, Any, Any]],
    guest: Callable[[Channel], Coroutine[Any, Any, Any]],
    keys: tuple[bytes, bytes] = (key_of(SECRET), key_of(SECRET)),
) -> tuple[Any, Any]:
    """What each side gives, or raises."""

    async def both() -> tuple[Any, Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                done.set_result(await gate(await admit(reader, writer, keys[0])))
            except Exception as error:
                done.set_result(error)
            finally:
                writer.close()

        server = await asyncio.start_server(welcome, ADDRESS, 0)
        try:
            ours: Any = await guest(await enter(ADDRESS, server.sockets[0].getsockname()[1], keys[1]))
        except Exception as error:
            ours = error
        theirs = await asyncio.wait_for(done, 20)
        server.close()
        return theirs, ours

    return asyncio.run(both())


async def receive(channel: Channel) -> bytes:
    return await channel.receive()


async def nothing(channel: Channel) -> None:
    channel.close()


def test_both_ends_hear_each_other() -> None:
    async def answer(channel: Channel) -> bytes:
        message = await channel.receive()
        await channel.send(message[::-1])
        return message

    async def ask(channel: Channel) -> bytes:
        await channel.send(b"x" * 60_000 + b"y")
        return await channel.receive()

    assert between(answer, ask) == (b"x" * 60_000 + b"y", b"y" + b"x" * 60_000)


@pytest.mark.parametrize("guess", [None, b"", b"of nobody but these test", b"x" * 32])
def test_another_secret_is_turned_away_by_both(guess: bytes | None) -> None:
    theirs, ours = between(receive, nothing, (key_of(SECRET), key_of(guess)))
    assert isinstance(theirs, StrangerError)
    assert isinstance(ours, StrangerError)


@pytest.mark.parametrize("harm", ["changed", "again", "swapped", "returned", "huge"])
def test_a_message_that_was_tampered_with_is_refused(harm: str) -> None:
    async def hear(channel: Channel) -> list[bytes]:
        await channel.send(b"hello")
        return [await channel.receive(), await channel.receive()]

    async def send(channel: Channel) -> None:
        written: list[bytes] = []
        write = channel._writer.write
        channel._writer.write = written.append  # type: ignore[method-assign]
        await channel.send(b"first")
        await channel.send(b"second")
        first, second = written
        if harm == "returned":
            first = await channel._reader.readexactly(20 + 5)  # what the gate said
        parts = {
            "changed": [first, second[:-1] + b"X"],
            "again": [first, first],
            "swapped": [second, first],
            "returned": [first, second],
            "huge": [first, b"\xff" * 20],
        }
        for part in parts[harm]:
            write(part)
        await asyncio.sleep(0.2)

    theirs, _ = between(hear, send)
    assert isinstance(theirs, StrangerError)


def test_something_else_that_listens_is_no_gate() -> None:
    async def come() -> None:
        async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.9 and so on and so on and so on\r\n")

        server = await asyncio.start_server(other, ADDRESS, 0)
        with contextlib.closing(server):
            await enter(ADDRESS, server.sockets[0].getsockname()[1], key_of(SECRET))

    with pytest.raises(StrangerError, match="something else"):
        asyncio.run(come())


# --------------------------------------------------------------------------------------------------------- meetings

Together = Callable[..., MultiNodeRendezvous]


@pytest.fixture
def meet() -> Iterator[Together]:
    """Makes meetings at one port; the first is the host."""
    port, made = free_port(), []

    def one(nodes: tuple[int, int] = (2, 2), secret: bytes | None = SECRET, meet: float = 30.0) -> MultiNodeRendezvous:
        made.append(MultiNodeRendezvous(ADDRESS, port, nodes, secret, RendezvousTimes(meet, 0.5)))
        made[-1].port = port  # type: ignore[attr-defined]
        return made[-1]

    yield one
    for meeting in reversed(made):
        meeting.close()


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, in threads."""
    found: list[Any] = [None] * len(work)

    def do(index: int) -> None:
        try:
            found[index] = work[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=do, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_two_nodes_meet_and_share_a_store_that_has_no_door_to_the_network(meet: Together) -> None:
    host, guest = meet(), meet()
    first, second = at_once(host.next_rendezvous, guest.next_rendezvous)
    assert (first.rank, first.world_size, second.rank, second.world_size) == (0, 2, 1, 2)
    assert first.bootstrap_store_info.master_addr == second.bootstrap_store_info.master_addr == ADDRESS
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert host.get_run_id() == guest.get_run_id()
    first.store.set("a", b"x" * 200_000)
    assert second.store.get("a") == b"x" * 200_000


def test_a_node_that_starts_again_is_joined_by_the_other_with_a_new_store(meet: Together) -> None:
    host, guest = meet(), meet()
    first, _ = at_once(host.next_rendezvous, guest.next_rendezvous)
    first.store.set("old", "words")
    again = threading.Thread(target=host.next_rendezvous)
    again.start()
    while guest.num_nodes_waiting() == 0:
        pass
    second = guest.next_rendezvous()
    again.join(30)
    assert not second.store.check(["old"])


def test_a_node_that_gives_up_ends_the_others(meet: Together) -> None:
    host, guest = meet(), meet()
    at_once(host.next_rendezvous, guest.next_rendezvous)
    guest.shutdown()
    host._looked = 0.0
    with pytest.raises(RendezvousClosedError):
        host.num_nodes_waiting()


@pytest.mark.parametrize("secret", [None, b"another secret of sixteen"])
def test_a_node_with_another_secret_is_told_so(
    meet: Together, secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "_STRANGE", 0.5)
    meet()
    with pytest.raises(ShardwellError, match="does not take this node's secret; give every node the same secret"):
        meet(secret=secret).next_rendezvous()


def test_a_node_that_expects_another_number_of_nodes_is_told_so(meet: Together) -> None:
    meet()
    with pytest.raises(ShardwellError, match="--nnodes 1:3: the node where the others meet was started with 2:2"):
        meet((1, 3)).next_rendezvous()


def test_nodes_that_do_not_come_are_waited_for_so_long_only(meet: Together) -> None:
    with pytest.raises(RendezvousTimeoutError):
        meet(meet=0.5).next_rendezvous()


def test_connections_that_prove_nothing_hold_nobody_up(meet: Together) -> None:
    host, guest = meet(), meet()
    where = (ADDRESS, host.port)  # type: ignore[attr-defined]
    crowd = [socket.create_connection(where, 5) for _ in range(2 * gates._MOST_STRANGERS)]
    first, second = at_once(host.next_rendezvous, guest.next_rendezvous)
    assert (first.rank, second.rank) == (0, 1)
    assert len(host._gate._strangers) <= gates._MOST_STRANGERS  # type: ignore[union-attr]
    for one in crowd:
        one.close()


def test_a_client_of_torchs_store_finds_no_store_at_the_gate(meet: Together) -> None:
    from datetime import timedelta

    host = meet()
    with pytest.raises(RuntimeError):
        reach_store(host.port, timedelta(seconds=1)).set("a", "b")  # type: ignore[attr-defined]


def test_who_proves_nothing_in_time_is_sent_away(meet: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HANDSHAKE", 0.2)
    host = meet()
    with socket.create_connection((ADDRESS, host.port), 5) as silent:  # type: ignore[attr-defined]
        silent.settimeout(10)
        assert len(silent.recv(100)) == 40  # the greeting, and then
        assert silent.recv(100) == b""


# ----------------------------------------------------------------------------------------------------------- rounds


class Node:
    def __init__(self, name: str) -> None:
        self.order = (name,)


def test_rounds_form_of_the_most_at_once_and_of_the_least_after_a_while() -> None:
    a, b, rounds = Node("a"), Node("b"), Rounds(1, 2, 5.0)
    rounds.join(b)
    assert rounds.advance(0.0) is None
    assert rounds.advance(5.0) == 1
    assert rounds.rank_of(b) == NodeRank(1, 0, 1)
    rounds.join(a)
    assert rounds.advance(6.0) is None
    assert rounds.num_waiting(6.0) == 1
    rounds.join(b)
    assert rounds.advance(6.0) == 2
    assert (rounds.rank_of(a), rounds.rank_of(b)) == (NodeRank(2, 0, 2), NodeRank(2, 1, 2))


def test_one_node_too_many_waits_and_disturbs_nobody() -> None:
    a, b, rounds = Node("a"), Node("b"), Rounds(1, 1, 5.0)
    rounds.join(a)
    assert rounds.advance(0.0) == 1
    rounds.join(b)
    assert (rounds.num_waiting(0.0), rounds.advance(0.0)) == (0, None)
    rounds.leave(a, 1.0)
    assert rounds.advance(1.0) == 2


def test_a_node_that_is_lost_is_told_of_if_nobody_noticed() -> None:
    a, b, rounds = Node("a"), Node("b"), Rounds(1, 2, 5.0)
    rounds.join(a)
    rounds.join(b)
    assert rounds.advance(0.0) == 1
    rounds.leave(b, 1.0)
    assert rounds.num_waiting(2.0) == 0  # its ranks are missed by those of the others, who say more
    assert rounds.num_waiting(20.0) == 1


# ---------------------------------------------------------------------------------------------------------- secrets


def test_a_secret_comes_from_the_environment_or_from_a_file_of_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  of nobody but these tests\n")
    file.chmod(0o600)
    assert job_secret({}) is None
    assert job_secret({"SHARDWELL_SECRET": "of nobody but these tests"}) == SECRET
    assert job_secret({"SHARDWELL_SECRET_FILE": str(file)}) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_file_that_others_may_read_or_change_is_no_secret(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(mode)
    with pytest.raises(ShardwellError, match=f"others may read or change it .mode 0{mode:o}.*chmod 600"):
        job_secret({"SHARDWELL_SECRET_FILE": str(file)})


def test_what_is_no_secret_is_refused_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for found, words in (
        ({"SHARDWELL_SECRET": "short"}, "at least 16 characters"),
        ({"SHARDWELL_SECRET": "x" * 20, "SHARDWELL_SECRET_FILE": "f"}, "both set"),
        ({"SHARDWELL_SECRET_FILE": str(tmp_path / "none")}, "cannot be read"),
        ({"SHARDWELL_SECRET_FILE": str(tmp_path / "pipe")}, "not a regular file"),
        ({"SHARDWELL_SECRET_FILE": str(tmp_path)}, "not a regular file"),
        ({"SHARDWELL_SECRET_FILE": "a\0b"}, "cannot be read"),
    ):
        with pytest.raises(ShardwellError, match=words):
            job_secret(found)
