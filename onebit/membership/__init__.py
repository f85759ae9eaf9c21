"""Members that come and go: a run that loses a machine continues, and lets a new one in.

    members = onebit.membership.connect("host:29400", founders=2)
    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3, transport=members)
    onebit.membership.begin(optimizer, scheduler=scheduler)
    ...                                     # the loop as it was
    onebit.membership.end(optimizer)

A member is a rank, or a node whose ranks divide the model (`node.py`). `rendezvous.py` agrees on the members,
`members.py` is the transport between the current ones, `change.py` brings an optimizer from one set of members to the
next, `copying.py` gives a newcomer the state beforehand, and `sampler.py` is the order of the data. `residuals.py`
counts what is lost, and `published.py` is what onlookers may know.
"""

from .buffers import Buffers
from .change import begin, end
from .members import Members
from .network import connect
from .rendezvous import MembershipError, Patience, Rendezvous, Roster
from .sampler import MemberSampler, MemberStream

__all__ = [
    "Buffers",
    "MemberSampler",
    "MemberStream",
    "Members",
    "MembershipError",
    "Patience",
    "Rendezvous",
    "Roster",
    "begin",
    "connect",
    "end",
]
