"""Creates the agreement that `control.coordinator` selects: the supervisors' vote, or etcd.

agreement = make_agreement(settings, rank, address, token, job_id, leader)       # one in every supervisor
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from recycle_pp.config.settings import Settings

from .agreement import PLANNING, Agreement, Leader, Place
from .refusal import REFUSED


def make_agreement(
    settings: Settings,
    rank: int,
    address: Place,
    token: str,
    job_id: str,
    leader: Leader | None,
    first_term: int = 0,
    others: Mapping[int, Place] = MappingProxyType({}),
) -> Agreement:
    """The agreement that `control.coordinator` selects.

    job_id      of the job; supervisors of another job with the same token count as dead
    leader      the current leader; None in rank 0 at the start of a job, which then calls `leader(after=-1)`
    first_term  the term that `leader(after=-1)` starts; newer than every term in the run folder
    others      for a new node, which is not a member yet: rank -> address of the other supervisors
    """
    if settings.control.coordinator == "etcd":
        from .etcd import Etcd
        from .etcd_agreement import EtcdAgreement

        etcd = Etcd(settings.control.endpoints or [])
        patience = settings.control.suspicion
        return EtcdAgreement(etcd, rank, address, token, leader, patience, first_term, bool(others), job_id)
    from .election import Election

    suspicion = settings.control.suspicion
    patience, refused = suspicion + PLANNING, min(REFUSED, suspicion)
    return Election(rank, address, token, leader, patience, refused, first_term, others, job_id)
