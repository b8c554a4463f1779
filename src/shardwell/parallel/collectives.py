"""All-gather, reduce-scatter, all-reduce, all-to-all and broadcast over a group of ranks.

`Collectives` announces a collective to the other ranks, counts its bytes, and has a transport move them. Backend and
device choose the transport once:

- *point-to-point* (gloo on cpu): `parallel/transport.py`;
- *torch's own collectives* (nccl, simulated ranks, gloo on cuda): `parallel/torch_transport.py`;
- *hierarchical*, over one of these, for all-gathers and reduce-scatters over several nodes: `parallel/hierarchical.py`;
- *replicated*, over one of these, for reduce-scatters whose results are replicated (HSDP): `parallel/replicated.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.memory import Device, TemporaryBuffers
from shardwell.parallel import quantized
from shardwell.parallel.agreement import Agreement, with_each_size, with_size
from shardwell.parallel.hierarchical import HierarchicalTransport
from shardwell.parallel.links import InFlight, Links
from shardwell.parallel.mesh import RankGroup, close_groups
from shardwell.parallel.nccl import abort_groups
from shardwell.parallel.replicated import ReplicatedTransport
from shardwell.parallel.simulated_moves import simulate_control, simulate_move
from shardwell.parallel.torch_transport import SingleRankTransport, TorchTransport
from shardwell.parallel.traffic import BETWEEN, INSIDE, TrafficKind, TrafficReport, TrafficStats
from shardwell.parallel.transport import (
    DirectTransport,
    GlooTransport,
    Reduction,
    Transport,
    Work,
    Works,
    end_loans,
    lend,
)

MANY_RANKS = 64  # from which on ranks compare tokens by collectives: one process holds the store, and serves them all


@dataclass(frozen=True)
class ReceivedParts:
    """The number of equal parts of a tensor that this rank receives in a collective, and the number of hops."""

    intra_node: int
    inter_node: int
    num_hops: int = 1


@dataclass(frozen=True)
class NodeHops:
    """The two groups that a collective over several nodes passes: its hops."""

    inside: Collectives  # this rank's node
    across: Collectives  # the ranks at the same position of all nodes


class Collectives:
    """The collectives of one engine over one group of ranks."""

    rank_group: RankGroup  # the ranks of the group, as this rank sees them
    device: Device
    links: Links
    direct: DirectTransport  # between all ranks of the group
    transport: Transport  # of all-gathers and reduce-scatters: `direct`, or hierarchical with several nodes
    hops: NodeHops | None  # the groups of the hierarchical transport
    replicate: Collectives | None  # the ranks that replicate this rank's shard: reduce-scatters sum over them, too
    shard_index: int  # of the shard of a flat buffer that this rank owns
    host_drives_progress: bool  # the host has to start what follows a hop: gloo's threads, and no stream, progress

    def __init__(
        self,
        mesh: RankGroup,
        device: Device,
        traffic_stats: TrafficStats,
        temporary: TemporaryBuffers,
        in_flight: InFlight | None = None,
    ) -> None:
        """`in_flight` has the collectives of the engine's other groups."""
        self.device, self.links = device, Links(mesh, in_flight)
        self.traffic, self.temporary = traffic_stats, temporary
        self.transport = self.direct = self._transport_for(mesh)
        self.hops, self.replicate, self.shard_index = None, None, mesh.rank
        self.host_drives_progress = mesh.backend == "gloo"
        self._spans_nodes = False  # some ranks are on other nodes
        self.set_nodes(mesh)

    def over(self, mesh: RankGroup) -> Collectives:
        """Return collectives of the same engine over another group of ranks."""
        other = Collectives(mesh, self.device, self.traffic, self.temporary, self.links.in_flight)
        other.agreement = self.agreement
        return other

    def _transport_for(self, mesh: RankGroup) -> DirectTransport:
        """Return the fastest transport for the backend and the device."""
        if mesh.size == 1:
            return SingleRankTransport(self.device)
        if mesh.backend == "gloo" and (self.device.torch_device.type == "cpu" or not self.device.has_device_memory):
            return GlooTransport(mesh, self.links, self.temporary)
        return TorchTransport(mesh, self.device, self.links, self.temporary)

    def set_nodes(self, mesh: RankGroup) -> None:
        """Set the mesh of the same ranks with other nodes, by which received bytes are counted."""
        num_local = mesh.num_local_peers
        self.rank_group = mesh
        self._from_peers = ReceivedParts(num_local, mesh.size - 1 - num_local, int(mesh.size > 1))
        if self.hops is None:
            self._from_shards = self._from_peers

    def use_nodes(self, mesh: RankGroup, hops: NodeHops | None) -> None:
        """Set the nodes that the ranks run on; with `hops`, all-gathers and reduce-scatters take these two hops."""
        self._spans_nodes = mesh.node_size < mesh.size
        self.set_nodes(mesh)
        if mesh.is_simulated:  # whose time depends on which ranks are in another node
            self.transport = self.direct = self._transport_for(mesh)
        if hops is not None:
            self.hops, (node, across) = hops, (hops.inside.rank_group, hops.across.rank_group)
            self.shard_index = self.shard_index_of(mesh.rank)
            self._from_shards = ReceivedParts(across.size * (node.size - 1), across.size - 1, 2)
            self.transport = HierarchicalTransport(
                hops.inside.direct,
                hops.across.direct,
                self.temporary,
                node_size=node.size,
                local_rank=node.rank,
                host_starts_hops=self.host_drives_progress,
            )

    def use_replicas(self, replicate: Collectives) -> None:
        """Sum reduce-scatters also over the ranks that replicate this rank's shard, by an all-reduce."""
        self.replicate = replicate
        self.transport = ReplicatedTransport(
            self.transport, replicate.direct, self.temporary, host_starts_hops=self.host_drives_progress
        )

    def connect_as(self, other: Collectives) -> None:
        """Move bytes over the links of other collectives of the same ranks: this rank's own were cut by a failure."""
        self.links, self.direct, self.transport = other.links, other.direct, other.transport
        self.hops, self.replicate, self.rank_group = other.hops, other.replicate, other.rank_group

    def shard_index_of(self, rank: int) -> int:
        """Return the index of the shard of a flat buffer that `rank` owns."""
        if self.hops is None:
            return rank
        node, local_rank = divmod(rank, self.hops.inside.rank_group.size)
        return local_rank * self.hops.across.rank_group.size + node

    @property
    def agreement(self) -> Agreement | None:
        """Return the agreement in which collectives are announced; None if they are not."""
        return self.links.agreement

    @agreement.setter
    def agreement(self, agreement: Agreement | None) -> None:
        self.links.agreement = agreement
        if agreement is not None and MANY_RANKS <= self.rank_group.size == agreement.size:
            agreement.compare = self.compare_tokens

    def compare_tokens(self, token: str) -> bool:
        """Return whether all ranks have this token, by an all-reduce of its digest. All ranks must call this."""
        code = int.from_bytes(hashlib.blake2b(token.encode(), digest_size=7).digest(), "big")
        highest = torch.tensor([code, -code], dtype=torch.int64, device=self.device.torch_device)
        lent = lend(highest) if self.host_drives_progress else highest
        self._complete(dist.all_reduce, lent, dist.ReduceOp.MAX)
        return bool(highest.tolist() == [code, -code])

    @property
    def host_starts_hops(self) -> bool:
        """Whether collectives have a second hop that the host has to start."""
        return self.host_drives_progress and (self.hops is not None or self.replicate is not None)

    # ------------------------------------------------------------------------------------------ moves of flat buffers

    def all_gather(
        self, flat: Tensor, token: str | None, kind: TrafficKind = TrafficKind.ALL_GATHER, codec: Codec | None = None
    ) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard must be in it already.

        With a codec, all shards get dequantised values, this rank's own too. Without a token, the caller announced it.
        """
        observer = self.traffic.observer
        if observer is not None and not observer.is_inside:
            return observer.follow(token, kind, partial(self.all_gather, flat, token, kind, codec))
        # A rank that is alone in its node announces it, too: the other ranks expect the token.
        if codec is not None and self.rank_group.size > 1 and flat.numel():
            self._begin(token, flat, kind, codec.num_bytes(flat.numel() // self.rank_group.size), self._from_shards)
            return quantized.all_gather(self, flat, codec, self.temporary)
        self._begin(token, flat, kind, flat.numel() * flat.element_size() // self.rank_group.size, self._from_shards)
        return self.transport.all_gather(flat if flat.element_size() > 1 else _sendable(flat))

    def all_gather_codes(
        self,
        rest: Tensor,
        flat: Tensor,
        codec: Codec,
        token: str,
        copied: Callable[[], object],
        keep: quantized.Keep | None = None,
    ) -> Work:
        """Start an all-gather of quantised shards into `flat`; `rest` is this rank's own quantised shard.

        `copied` is called when the copy of `rest` is enqueued on the all-gather stream, which reads it no more after
        that. `keep` is passed the quantised shards of all ranks.
        """
        kind, observer = TrafficKind.ALL_GATHER, self.traffic.observer
        if observer is not None and not observer.is_inside:
            return observer.follow(token, kind, partial(self.all_gather_codes, rest, flat, codec, token, copied, keep))
        num_bytes = codec.num_bytes(flat.numel() // self.rank_group.size)
        self._begin(token, flat, kind, num_bytes, self._from_shards)
        return quantized.all_gather(self, flat, codec, self.temporary, rest, copied, keep)

    def reduce_scatter(
        self,
        flat: Tensor,
        into: Tensor,
        scale: float,
        accumulate: bool,
        token: str | None,
        codecs: tuple[Codec, Codec] | None = None,
        kind: TrafficKind = TrafficKind.REDUCE_SCATTER,
        residual: Tensor | None = None,
    ) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`; `flat` is invalid then.

        The sum is made in fp32 at least, in rank order with this rank first, unless the library's reduce-scatter makes
        it. `codecs` quantise inside a node and between nodes; `residual` keeps the quantisation error of the last hop,
        which is added the next time. Without a token, the caller has announced the collective.
        """
        observer = self.traffic.observer
        if observer is not None and not observer.is_inside:
            start = partial(self.reduce_scatter, flat, into, scale, accumulate, token, codecs, kind, residual)
            return observer.follow(token, kind, start)
        if self.rank_group.size > 1:
            if codecs is not None and flat.numel():
                path = self._quantized_path(*codecs)
                for (comm, _), num_bytes in zip(path, quantized.bytes_per_peer(path, flat.numel()), strict=True):
                    self._begin(token, flat, kind, num_bytes, comm._from_peers)
                    token = None  # announced once, counted for each hop
                return quantized.reduce_scatter(path, flat, into, scale, accumulate, self.temporary, residual)
            self._begin(
                token, flat, kind, flat.numel() * flat.element_size() // self.rank_group.size, self._from_shards
            )
            if self.replicate is not None:
                self.replicate.count_all_reduce(flat, into.numel(), kind)
        return self.transport.reduce_scatter(flat, into, scale, accumulate)

    def all_gathers(self, flats: Sequence[Tensor], token: str, kind: TrafficKind) -> Work:
        """Start all-gathers of several tensors in place as one collective, which is announced and counted once."""
        observer = self.traffic.observer
        if observer is not None and not observer.is_inside:
            return observer.follow(token, kind, partial(self.all_gathers, flats, token, kind))
        num_bytes = sum(flat.nbytes // self.rank_group.size for flat in flats)
        self._begin(self._with_sizes(token, flats), None, kind, num_bytes, self._from_shards)
        return self.transport.all_gathers([flat if flat.element_size() > 1 else _sendable(flat) for flat in flats])

    def reduce_scatters(self, parts: Sequence[Reduction], token: str, kind: TrafficKind) -> Work:
        """Start several reduce-scatters, none of them quantised, as one collective; see `reduce_scatter`."""
        observer = self.traffic.observer
        if observer is not None and not observer.is_inside:
            return observer.follow(token, kind, partial(self.reduce_scatters, parts, token, kind))
        if self.rank_group.size > 1:
            flats = [one.flat for one in parts]
            num_bytes = sum(flat.nbytes // self.rank_group.size for flat in flats)
            self._begin(self._with_sizes(token, flats), None, kind, num_bytes, self._from_shards)
            if self.replicate is not None:
                for one in parts:
                    self.replicate.count_all_reduce(one.flat, one.into.numel(), kind)
        return self.transport.reduce_scatters(parts)

    def _with_sizes(self, token: str, flats: Sequence[Tensor]) -> str:
        """Return a token with the sizes and dtypes of several tensors, if all ranks take part as in `_begin`."""
        agreement, replicas = self.links.agreement, self.replicate
        num_issuing = self.rank_group.size * (1 if replicas is None else replicas.rank_group.size)
        if agreement is None or num_issuing != agreement.size:
            return token
        return with_each_size(token, tuple([(flat.numel(), flat.dtype) for flat in flats]))

    def count_all_reduce(self, flat: Tensor, numel: int, kind: TrafficKind) -> None:
        """Count the all-reduce of `numel` sums of `flat`: a reduce-scatter and an all-gather, in fp32 at least."""
        wide, peers = torch.promote_types(flat.dtype, torch.float32), self._from_peers
        num_bytes = -(-numel // self.rank_group.size) * wide.itemsize
        self._begin(None, None, kind, 2 * num_bytes, peers)

    def residual_numel(self, numel: int, codecs: tuple[Codec, Codec]) -> int:
        """Return the number of elements that the last hop of a quantised reduce-scatter quantises."""
        return quantized.residual_numel(self._quantized_path(*codecs), numel) if self.rank_group.size > 1 else 0

    def _quantized_path(self, inside: Codec, between: Codec) -> list[tuple[Collectives, Codec]]:
        """Return the hops of a quantised reduce-scatter, with the codec of each."""
        if self.hops is not None:
            return [(self.hops.inside, inside), (self.hops.across, between)]
        return [(self, between if self._spans_nodes else inside)]

    # ---------------------------------------------------------------------------------------------- other collectives

    def all_to_all(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        token: str,
        kind: TrafficKind = TrafficKind.OPTIMIZER,
    ) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it. Sizes may differ; both sides must know them."""
        ranks = self.rank_group
        incoming[ranks.rank].copy_(outgoing[ranks.rank])
        if ranks.size == 1:
            return
        sizes = [0 if rank == ranks.rank else tensor.nbytes for rank, tensor in enumerate(incoming)]
        intra_node = sum(size for rank, size in enumerate(sizes) if ranks.is_same_node(rank))
        received = ReceivedParts(intra_node, sum(sizes) - intra_node, num_hops=ranks.size)
        self._begin(token, None, kind, 1, received)
        self.direct.exchange(outgoing, incoming)

    def broadcast(
        self, tensor: Tensor, source: int = 0, kind: TrafficKind = TrafficKind.SETUP, token: str = "broadcast"
    ) -> None:
        """Overwrite `tensor` on every rank with the tensor of rank `source`."""
        if self.rank_group.size == 1 or tensor.numel() == 0:
            return
        is_text = tensor.dtype is torch.uint8  # text has any length, which the ranks were sent before
        self._begin(token, None if is_text else tensor, kind, tensor.nbytes, self._received_from(source))
        self._complete(dist.broadcast, _sendable(tensor), src=self.rank_group.global_rank(source))

    def scatter(self, flat: Tensor, into: Tensor, token: str, source: int = 0) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; `flat` may be overwritten on the other ranks."""
        if self.rank_group.size == 1 or flat.numel() == 0:
            start = self.shard_index * into.numel()
            into.copy_(flat[start : start + into.numel()])
            return
        received = into if self.direct.sends_shards else flat
        self._begin(token, into, TrafficKind.SETUP, received.nbytes, self._received_from(source))
        indices = [self.shard_index_of(rank) for rank in range(self.rank_group.size)]
        self.direct.scatter(_sendable(flat), _sendable(into), source, indices)

    def all_reduce_sum(self, value: Tensor, token: str) -> None:
        """Sum a small tensor over the ranks, in place."""
        if self.rank_group.size > 1:
            num_bytes = 2 * value.numel() * value.element_size()
            self._begin(token, value, TrafficKind.CONTROL, num_bytes, self._from_peers)
            if self.rank_group.is_simulated:
                simulate_control(self.rank_group)
                return
            # gloo gets an alias, since a script may end right after this
            self._complete(dist.all_reduce, lend(value) if self.host_drives_progress else value)

    def all_reduce_min(self, value: float, token: str) -> float:
        """Return the smallest of all ranks' values."""
        if self.rank_group.size == 1:
            return value
        least = self.device.scalar(value, torch.float64)
        self._begin(token, None, TrafficKind.CONTROL, 2 * least.nbytes, self._from_peers)
        if self.rank_group.is_simulated:
            simulate_control(self.rank_group)
            return value
        lent = lend(least) if self.host_drives_progress else least
        self._complete(dist.all_reduce, lent, dist.ReduceOp.MIN)
        return value if least.is_meta else float(least)

    def barrier(self, token: str = "barrier") -> None:
        """Wait until all ranks have called this."""
        self.all_reduce_sum(self.device.scalar(0.0), token)

    def tell_all(self, mine: bytes, token: str) -> list[bytes]:
        """All-gather the bytes of each rank, which must have the same length on all ranks."""
        size = self.rank_group.size
        if size == 1:
            return [mine]
        self._begin(token, None, TrafficKind.CONTROL, len(mine), self._from_peers)
        flat = torch.zeros(size * len(mine), dtype=torch.uint8, device=self.device.torch_device)
        flat.chunk(size)[self.rank_group.rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self.direct.all_gather(flat).wait()
        return [bytes(part.tolist()) for part in flat.cpu().chunk(size)]

    # ------------------------------------------------------------------------------- announcing, counting, completing

    def _begin(
        self, token: str | None, tensor: Tensor | None, kind: TrafficKind, num_bytes: int, received: ReceivedParts
    ) -> None:
        """Announce a collective, unless the caller has, and count the parts of `num_bytes` that this rank receives.

        The token gets the size and dtype of the tensor if all ranks take part, in this group or in one like it: those
        of single nodes may differ.
        """
        agreement = self.links.agreement
        if token is not None and agreement is not None:
            # the ranks that issue such a collective, in this group or in one that replicates it
            size, replicas = self.rank_group.size, self.replicate
            num_issuing = size if replicas is None else size * replicas.rank_group.size
            if tensor is not None and num_issuing == agreement.size:
                token = with_size(token, tensor.numel(), tensor.dtype)
            if agreement.failures.error is not None or not agreement.tokens.follow(token):
                agreement.announce(token)
        if received.num_hops:
            self.traffic.received[kind, INSIDE] += received.intra_node * num_bytes
            self.traffic.received[kind, BETWEEN] += received.inter_node * num_bytes
            self.traffic.calls[kind] += received.num_hops

    def begin(self, token: str, kind: TrafficKind, num_bytes: int) -> None:
        """Announce a collective of the caller's own, in which each other rank sends this one so many bytes."""
        self._begin(token, None, kind, num_bytes, self._from_peers)

    def complete(self, collective: Callable[..., Any], *args: Any) -> None:
        """Run a collective of torch.distributed that was announced: the host waits with gloo, else the stream."""
        self._complete(collective, *args)

    def start(self, collective: Callable[..., Any], *args: Any) -> Work:
        """Start a collective of torch.distributed that was announced; its tensors are read when it is waited for."""
        if self.rank_group.is_simulated:
            simulate_move(collective, args, self.rank_group)
            return Work()
        works = Works()
        if self.links.agreement is not None:
            works.announced = self.links.agreement.tokens.progress, self.links.agreement.tokens.last
        try:
            works.append(collective(*args, group=self.rank_group.group, async_op=True))
        except RuntimeError as error:
            self.links.raise_cause(error)
        return Work(partial(self.direct.wait, works), end_loans)

    def count_message(self, num_bytes: int, source: int, kind: TrafficKind) -> None:
        """Count a message from one global rank of the group."""
        ranks = self.rank_group
        self._begin(
            None, None, kind, num_bytes, self._received_from(ranks.ranks.index(source) if ranks.ranks else source)
        )

    def _received_from(self, source: int) -> ReceivedParts:
        """Return what this rank receives if only `source` sends."""
        if source == self.rank_group.rank:
            return ReceivedParts(0, 0)
        return ReceivedParts(1, 0) if self.rank_group.is_same_node(source) else ReceivedParts(0, 1)

    def _complete(self, collective: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Start a collective of torch.distributed and wait for it."""
        if self.rank_group.is_simulated:
            simulate_move(collective, (tensor, *args), self.rank_group)
            return
        try:
            work = collective(tensor, *args, **kwargs, group=self.rank_group.group, async_op=True)
        except RuntimeError as error:
            self.links.raise_cause(error)
        self.direct.wait([work])
        del work, tensor
        end_loans()

    def end_step(self) -> None:
        """End a step: its traffic becomes the last report, and the next token begins a new step of the agreement."""
        traffic = self.traffic
        traffic.last = TrafficReport(dict(traffic.received), dict(traffic.calls))
        traffic.received.clear()
        traffic.calls.clear()
        if self.links.agreement is not None:
            self.links.agreement.tokens.begin_step()

    # --------------------------------------------------------------------------------------------------------- ending

    def abort_links(self) -> None:
        """Break this rank's links so that peers waiting for it wake up with an error."""
        abort_links([self])

    def close(self) -> None:
        """Destroy the process groups that belong to this engine."""
        if self.hops is not None:
            self.hops.inside.close()
            self.hops.across.close()
        close_groups(self.links.channels)
        self.rank_group.close()
        end_loans()


def abort_links(groups: Sequence[Collectives]) -> None:
    """Break this rank's links in these groups and in their hops; NCCL's communicators are aborted together."""
    hops = [hop for one in groups if one.hops is not None for hop in (one.hops.inside, one.hops.across)]
    every = [*groups, *hops]
    abort_groups([group for one in every for group in one.links.nccl_groups])
    for one in every:
        one.links.abort()


def _sendable(tensor: Tensor) -> Tensor:
    """Return a view that every backend can send: quantised values of one byte (fp8) go as bytes."""
    is_quantized = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if is_quantized else tensor
