"""The public names of gradsync, with the modules that define them. __init__.py reads this file too."""

from gradsync import comm as comm
from gradsync import mpi as mpi
from gradsync.beside_mpi import from_mpi as from_mpi
from gradsync.bucketing.callback import AllreduceCallback as AllreduceCallback
from gradsync.bucketing.callback import make_allreduce_cb as make_allreduce_cb
from gradsync.bucketing.lists import bcast_list_ as bcast_list_
from gradsync.bucketing.lists import get_offsets as get_offsets
from gradsync.bucketing.lists import pack_allreduce_split as pack_allreduce_split
from gradsync.bucketing.lists import param_pack_concat as param_pack_concat
from gradsync.bucketing.lists import param_pack_split as param_pack_split
from gradsync.bucketing.trees import average_gradients as average_gradients
from gradsync.bucketing.trees import broadcast_tree as broadcast_tree
from gradsync.communicators.communicator import Communicator as Communicator
from gradsync.communicators.groups import NonMember as NonMember
from gradsync.consistency import check_consistency as check_consistency
from gradsync.errors import AuthenticationError as AuthenticationError
from gradsync.errors import BackendUnavailable as BackendUnavailable
from gradsync.errors import CollectiveTimeout as CollectiveTimeout
from gradsync.errors import CommunicatorClosed as CommunicatorClosed
from gradsync.errors import FutureNotReady as FutureNotReady
from gradsync.errors import GradientCancelled as GradientCancelled
from gradsync.errors import GradsyncError as GradsyncError
from gradsync.errors import InvalidArgument as InvalidArgument
from gradsync.errors import MissingGradient as MissingGradient
from gradsync.errors import MpiError as MpiError
from gradsync.errors import NcclError as NcclError
from gradsync.errors import NonFiniteGradient as NonFiniteGradient
from gradsync.errors import PlanMismatch as PlanMismatch
from gradsync.errors import RankFailed as RankFailed
from gradsync.errors import RendezvousError as RendezvousError
from gradsync.errors import RendezvousTimeout as RendezvousTimeout
from gradsync.errors import UnsupportedDtype as UnsupportedDtype
from gradsync.futures import CollectiveFuture as CollectiveFuture
from gradsync.futures import GradientFuture as GradientFuture
from gradsync.launchers import is_launched as is_launched
from gradsync.launching.calls import MainProcessError as MainProcessError
from gradsync.launching.calls import WorkerError as WorkerError
from gradsync.launching.calls import set_start_method as set_start_method
from gradsync.launching.faces import launch as launch
from gradsync.launching.faces import launcher as launcher
from gradsync.launching.faces import spawn as spawn
from gradsync.launching.spawned import MultiprocessContext as MultiprocessContext
from gradsync.machine import free_port as free_port
from gradsync.process_group import destroy_process_group as destroy_process_group
from gradsync.process_group import get_communicator as get_communicator
from gradsync.process_group import group_barrier as group_barrier
from gradsync.process_group import init_process_group as init_process_group
from gradsync.process_group import is_distributed as is_distributed
from gradsync.process_group import is_initialized as is_initialized
from gradsync.process_group import new_group as new_group
from gradsync.process_group import override_backend as override_backend
from gradsync.process_group import rebuild as rebuild
from gradsync.process_group import synchronized as synchronized
from gradsync.reduction import ReduceOp as ReduceOp
from gradsync.sharding import shard_indices as shard_indices

__version__: str
# The world's communicator. It exists only between init_process_group() and destroy_process_group().
WORLD: Communicator
