"""The tiers of a rank from its configuration. Invariant: they hold exactly the pages of the rank's own caches, and read from
storage only what a rank of the same identity wrote (identity.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed.runtime.kv.identity import namespace
from tokenspeed.runtime.kv.pages import Pages
from tokenspeed.runtime.kv.store import open_store, parse_address
from tokenspeed.runtime.kv.tiers import RankTiers, Report

if TYPE_CHECKING:
    from tokenspeed.runtime.executor import Executor, RankConfig


def rank_tiers(config: RankConfig, executor: Executor, report: Report) -> RankTiers:
    """StartupError where the host pages or the store cannot be had. A step of the executor waits for what it loads here."""
    groups = [(executor.paged["slots"], config.num_pages)]
    if config.window_pages:
        groups.append((executor.paged["window_slots"], config.window_pages))
    pages = Pages(groups, config.host_pages)
    store, timeout = None, 0.0
    if config.storage:
        address = parse_address(config.storage)
        mesh = executor.plan.mesh
        part = {a: c for a, c in mesh.coords(config.rank).items() if a not in executor.plan.home}
        caches = [cache for held, _ in groups for cache in held]
        name = namespace(config.identity, part, caches, config.page_size)
        store, timeout = open_store(address, name, pages.page_bytes), address.timeout
    executor.tiers = RankTiers(pages, store, timeout, report)
    return executor.tiers
