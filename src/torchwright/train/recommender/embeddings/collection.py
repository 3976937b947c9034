"""Tables of embeddings, shared out over a sharding group and replicated across groups."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchwright.train.recommender.embeddings.exchange import exchange, exchange_with_gradient
from torchwright.train.recommender.embeddings.lookup import ShardTensors
from torchwright.train.recommender.embeddings.optimizers import RowOptimizer
from torchwright.train.recommender.embeddings.planner import Shard, ShardPlan
from torchwright.train.recommender.embeddings.tables import EmbeddingError, Inputs, Jagged, Table
from torchwright.train.recommender.embeddings.topology import Groups

BLOCK = 4096
"""Rows that are drawn together, so that a shard's numbers do not depend on how the table is cut."""


class ShardedEmbeddings(nn.Module):
    """Feature → embeddings of each process's own bags, looked up wherever the rows lie.

    embeddings = ShardedEmbeddings(tables, plan, RowWiseAdagrad(0.05), groups=Groups.make(topology), seed=0)
    embeddings(inputs)["clicked"]      (bags, dim), or (ids, dim) where the table does not pool
    loss.backward()                    updates the rows that were looked up
    embeddings.sync()                  every N steps: replicas take their mean

    Every process of a group must call forward, and backward through what it returned: both exchange. The gradient of a
    row is the mean over the group's processes of what each one's own loss gives, as with data parallelism. Without
    `groups` one process holds everything. The weights are not registered as parameters: no optimizer or wrapper sees
    them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        plan: ShardPlan,
        optimizer: RowOptimizer,
        *,
        groups: Groups | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`dtype` is the weights'. Raises `EmbeddingError` where the plan does not fit the tables or the groups."""
        super().__init__()
        plan.check(tables)
        size = groups.topology.group_size if groups else 1
        if plan.processes != size:
            raise EmbeddingError(f"the plan is for {plan.processes} processes", found=f"groups of {size}")
        self.tables = {table.name: table for table in tables}
        self.plan, self.optimizer, self.groups, self._size = plan, optimizer, groups, size
        self._place = groups.place if groups else 0
        self._group = groups.sharding if groups else None
        self._table_of = {feature: table for table in tables for feature in table.features}
        self._shards = [plan.of(owner) for owner in range(size)]
        self._own = {
            shard: ShardTensors(draw(self.tables[shard.table], shard, seed, dtype, device), optimizer)
            for shard in self._shards[self._place]
        }
        self._anchor = torch.zeros(1, dtype=dtype, device=device, requires_grad=True)

    def forward(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Raise `EmbeddingError` for a feature that is missing or unknown, and for ids without a row."""
        self._check(inputs)
        bags = {feature: self._bags(feature, inputs[feature]) for feature in self._table_of}
        counts = self._everyones_counts(bags)
        lengths, ids = self._ask(bags, counts)
        answers = self._look_up(lengths, ids, counts)
        return self._assemble(answers, bags, inputs, counts)

    @torch.no_grad()
    def sync(self, *, state: bool = False) -> None:
        """Set the weights, or with `state` the optimizer's state instead, to the mean over all replicas."""
        if self.groups is None:
            return
        for tensor in self._replicated(state=state):
            dist.all_reduce(tensor, group=self.groups.replicas)
            tensor /= self.groups.topology.groups

    @torch.no_grad()
    def drift(self) -> dict[str, float]:
        """Table → how far its replicas are apart: the root of their mean squared distance from their mean, over the
        mean's own root mean square. Every process must call this; all get the same.
        """
        found = torch.zeros(len(self.tables), 2, dtype=torch.float64, device=self._anchor.device)
        place = {name: i for i, name in enumerate(self.tables)}
        for shard, tensors in self._own.items():
            mean = tensors.weight_RC.double()
            own = mean.clone()
            if self.groups is not None:
                dist.all_reduce(mean, group=self.groups.replicas)
                mean /= self.groups.topology.groups
            apart = (own - mean).square().sum()
            found[place[shard.table]] += torch.stack([apart, mean.square().sum()])
        if self.groups is not None:
            dist.all_reduce(found)
        return {
            name: float((found[i, 0] / found[i, 1].clamp_min(1e-300)).sqrt()) for name, i in place.items()
        }

    @torch.no_grad()
    def full(self, name: str) -> torch.Tensor:
        """A whole table (rows, dim), gathered from the group's processes, all of which must call this."""
        table = self.tables[name]
        out = torch.zeros(table.rows, table.dim, dtype=self._anchor.dtype, device=self._anchor.device)
        for shard, tensors in self._own.items():
            if shard.table == name:
                out[slice(*shard.rows), slice(*shard.columns)] = tensors.weight_RC
        if self._group is not None:
            dist.all_reduce(out, group=self._group)
        return out

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's weights and state, for a checkpoint; names tell table, rows and columns."""
        for shard, tensors in self._own.items():
            place = f"{shard.table}[{shard.rows[0]}:{shard.rows[1]},{shard.columns[0]}:{shard.columns[1]}]"
            yield f"{place}.weight", tensors.weight_RC
            for key, value in tensors.state.items():
                yield f"{place}.{key}", value

    def _replicated(self, *, state: bool) -> Iterator[torch.Tensor]:
        for tensors in self._own.values():
            if state:
                yield from tensors.state.values()
            else:
                yield tensors.weight_RC

    def _check(self, inputs: Inputs) -> None:
        if set(inputs) != set(self._table_of):
            missing, more = (
                sorted(set(self._table_of) - set(inputs)),
                sorted(set(inputs) - set(self._table_of)),
            )
            raise EmbeddingError(
                "the inputs are not the tables' features",
                found=f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(more) or 'none'}",
            )
        for feature, bag in inputs.items():
            bag.check(feature, self._table_of[feature].rows)

    def _bags(self, feature: str, bag: Jagged) -> Jagged:
        """An embedding that is not pooled is a bag of its own."""
        if self._table_of[feature].pooling == "none":
            return Jagged(bag.ids, torch.ones_like(bag.ids))
        return bag

    def _everyones_counts(self, bags: dict[str, Jagged]) -> list[dict[str, int]]:
        """Each process's number of bags of each feature."""
        own = torch.tensor([len(bag.lengths) for bag in bags.values()], device=self._anchor.device)
        if self._group is None:
            rows = [own]
        else:
            rows = [torch.empty_like(own) for _ in range(self._size)]
            dist.all_gather(rows, own, group=self._group)
        return [dict(zip(bags, row.tolist(), strict=True)) for row in rows]

    def _pieces(self, owner: int) -> Iterator[tuple[Shard, str]]:
        """Yield the messages to or from a process, in order."""
        for shard in self._shards[owner]:
            for feature in self.tables[shard.table].features:
                yield shard, feature

    def _ask(
        self, bags: dict[str, Jagged], counts: list[dict[str, int]]
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Send every owner the ids of its rows; returns each process's lengths and ids for each of our own pieces."""
        parts = [
            [_within(bags[feature], shard) for shard, feature in self._pieces(o)] for o in range(self._size)
        ]
        out = [sum(len(part.lengths) for part in row) for row in parts]
        sizes = [[counts[s][feature] for _, feature in self._pieces(self._place)] for s in range(self._size)]
        lengths = self._exchange(
            [part.lengths for row in parts for part in row], out, [sum(row) for row in sizes]
        )
        lengths_by = [
            list(of.split(row)) for of, row in zip(lengths.split(list(map(sum, sizes))), sizes, strict=True)
        ]
        held = [[int(part.sum()) for part in row] for row in lengths_by]
        out = [sum(len(part.ids) for part in row) for row in parts]
        ids = self._exchange([part.ids for row in parts for part in row], out, [sum(row) for row in held])
        ids_by = [list(of.split(row)) for of, row in zip(ids.split(list(map(sum, held))), held, strict=True)]
        return lengths_by, ids_by

    def _look_up(
        self, lengths: list[list[torch.Tensor]], ids: list[list[torch.Tensor]], counts: list[dict[str, int]]
    ) -> torch.Tensor:
        """Answer every process; returns the answers to our own questions, one after another."""
        replies: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        pieces = list(self._pieces(self._place))
        for shard, tensors in self._own.items():
            places = [i for i, (of, _) in enumerate(pieces) if of is shard]
            asked = [(s, i) for s in range(self._size) for i in places]
            pooled_NC = tensors.pooled(
                torch.cat([ids[s][i] for s, i in asked]) - shard.rows[0],
                torch.cat([lengths[s][i] for s, i in asked]),
                1 / self._size,
                self._anchor,
            )
            for (s, _), part_NC in zip(
                asked, pooled_NC.split([len(lengths[s][i]) for s, i in asked]), strict=True
            ):
                replies[s].append(part_NC.flatten())
        out = [sum(map(len, row)) for row in replies]
        # With the anchor a process that holds nothing takes part in the backward pass as well.
        sent = torch.cat([self._anchor[:0], *(part for row in replies for part in row)])
        if self._group is None:
            return sent
        own = counts[self._place]
        into = [
            sum(own[feature] * shard.width for shard, feature in self._pieces(o)) for o in range(self._size)
        ]
        return exchange_with_gradient(sent, out, into, self._group)

    def _assemble(
        self, answers: torch.Tensor, bags: dict[str, Jagged], inputs: Inputs, counts: list[dict[str, int]]
    ) -> dict[str, torch.Tensor]:
        """Parts of the rows are added, parts of the columns put side by side."""
        own = counts[self._place]
        pieces = [piece for owner in range(self._size) for piece in self._pieces(owner)]
        sums: dict[str, dict[tuple[int, int], torch.Tensor]] = {feature: {} for feature in bags}
        for (shard, feature), flat in zip(
            pieces, answers.split([own[feature] * shard.width for shard, feature in pieces]), strict=True
        ):
            part_NC, columns = flat.view(own[feature], shard.width), sums[feature]
            columns[shard.columns] = columns[shard.columns] + part_NC if shard.columns in columns else part_NC
        out = {
            feature: torch.cat([parts[at] for at in sorted(parts)], dim=1) for feature, parts in sums.items()
        }
        for feature, table in self._table_of.items():
            if table.pooling == "mean":
                lengths = inputs[feature].lengths.clamp_min(1)[:, None]
                out[feature] = out[feature] / lengths.to(out[feature].dtype)
        return out

    def _exchange(self, parts: Sequence[torch.Tensor], out: list[int], into: list[int]) -> torch.Tensor:
        sent = torch.cat(list(parts))
        return sent if self._group is None else exchange(sent, out, into, self._group)


def _within(bag: Jagged, shard: Shard) -> Jagged:
    """The ids of the shard's rows, in the same bags."""
    begin, end = shard.rows
    inside = (bag.ids >= begin) & (bag.ids < end)
    if bool(inside.all()):
        return bag
    return Jagged(bag.ids[inside], torch.bincount(bag.bags()[inside], minlength=len(bag.lengths)))


def draw(
    table: Table, shard: Shard, seed: int, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """A shard's first weights, uniform within ±1/√rows as a part of the whole table's, however that is cut."""
    begin, end = shard.rows
    weight_RC = torch.empty(end - begin, shard.width, dtype=dtype, device=device)
    bound = table.rows**-0.5
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {table.name} {block}".encode()))
        first = block * BLOCK
        rows = torch.empty(min(BLOCK, table.rows - first), table.dim).uniform_(
            -bound, bound, generator=generator
        )
        low, high = max(begin, first), min(end, first + BLOCK)
        weight_RC[low - begin : high - begin] = rows[low - first : high - first, slice(*shard.columns)]
    return weight_RC
