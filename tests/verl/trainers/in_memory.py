"""The functions of TransferQueue that verl calls, with everything in this process.

Rows come back as its simple storage packs them: tensors of one dimension as jagged ones, numbers
in one tensor, everything else in a stack. A field that no row has is left out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta

FUNCTIONS = ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear")


class Queue:
    """Rows by partition and key; a row has fields and a tag."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, dict[str, Any]]] = {}
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        """Name of each call that changes something, and the keys."""

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        partitions = list(self.tags) if partition_id is None else [partition_id]
        return copy.deepcopy({name: self.tags.get(name, {}) for name in partitions})

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        self.calls.append(("put", tuple(keys)))
        assert fields is None or fields.batch_size[0] == len(keys)
        for at, key in enumerate(keys):
            tag = self.tags.setdefault(partition_id, {}).setdefault(key, {})
            tag.update(copy.deepcopy(tags[at]) if tags else {})
            row = self.fields.setdefault(partition_id, {}).setdefault(key, {})
            for name in () if fields is None else fields.keys():
                row[name] = copy.deepcopy(_item(fields[name], at))
        names = list(self.fields[partition_id][keys[0]])
        kept = [self.tags[partition_id][key] for key in keys]
        return KVBatchMeta(keys=list(keys), tags=kept, partition_id=partition_id, fields=names)

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str] | None = None
    ) -> TensorDict:
        rows = [self.fields[partition_id][key] for key in keys]
        names = list(rows[0]) if select_fields is None else select_fields
        columns = {
            name: _packed([copy.deepcopy(row[name]) for row in rows])
            for name in names
            if name in rows[0]
        }
        return TensorDict(columns, batch_size=len(keys))

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        self.calls.append(("clear", tuple(sorted(keys))))
        for key in keys:
            self.fields.get(partition_id, {}).pop(key, None)
            self.tags.get(partition_id, {}).pop(key, None)

    # -- what the workers call -------------------------------------------------------------

    def init(self) -> None:
        """There is nothing to connect to."""

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.kv_batch_put([key], partition_id, tags=[tag])

    async def async_kv_batch_put(
        self, keys: list[str], fields: Any, tags: list[Any], partition_id: str
    ) -> None:
        self.kv_batch_put(keys, partition_id, fields, tags)


def _item(column: Any, at: int) -> Any:
    item = column[at]
    return getattr(item, "data", item) if not isinstance(item, torch.Tensor) else item


def _packed(items: list[Any]) -> Any:
    if not all(isinstance(item, torch.Tensor) for item in items):
        return NonTensorStack(*items)
    if all(item.dim() == 0 for item in items):
        return torch.stack(items)
    return torch.nested.as_nested_tensor(items, layout=torch.jagged)
