"""Every record that crosses a process border. The docs and types of the fields stand in avro/<Name>.avsc.

A dataclass and its .avsc name the same fields in the same order; a test holds them together.
Ids are 16 raw bytes, tokens are model vocabulary ids, times are milliseconds (of the epoch where the
name ends in `_at`, a duration where it ends in `_ms`). A run is (slot, epoch): one life of one worker.
"""

from schemas.batch_job_records import BatchCancel as BatchCancel
from schemas.batch_job_records import BatchError as BatchError
from schemas.batch_job_records import BatchJob as BatchJob
from schemas.batch_job_records import BatchPart as BatchPart
from schemas.batch_job_records import BatchState as BatchState
from schemas.fleet_records import Amount as Amount
from schemas.fleet_records import ApiKey as ApiKey
from schemas.fleet_records import BatchRequest as BatchRequest
from schemas.fleet_records import BatchResult as BatchResult
from schemas.fleet_records import Budget as Budget
from schemas.fleet_records import ClassLimits as ClassLimits
from schemas.fleet_records import ClassLoad as ClassLoad
from schemas.fleet_records import Decision as Decision
from schemas.fleet_records import Drain as Drain
from schemas.fleet_records import Heartbeat as Heartbeat
from schemas.fleet_records import Join as Join
from schemas.fleet_records import Left as Left
from schemas.fleet_records import Model as Model
from schemas.fleet_records import PartitionStatus as PartitionStatus
from schemas.fleet_records import Preemption as Preemption
from schemas.fleet_records import Price as Price
from schemas.fleet_records import QueuedTokens as QueuedTokens
from schemas.fleet_records import Shedding as Shedding
from schemas.fleet_records import Spend as Spend
from schemas.fleet_records import Tenant as Tenant
from schemas.fleet_records import Unpaired as Unpaired
from schemas.fleet_records import WorkerStatus as WorkerStatus
from schemas.handoff_records import ContentCheck as ContentCheck
from schemas.handoff_records import Handoff as Handoff
from schemas.handoff_records import Offer as Offer
from schemas.handoff_records import PoolRank as PoolRank
from schemas.handoff_records import Reserved as Reserved
from schemas.handoff_records import TransferEnded as TransferEnded
from schemas.kv_layout import KVLayout as KVLayout
from schemas.request_records import Admitted as Admitted
from schemas.request_records import Attach as Attach
from schemas.request_records import Cancellation as Cancellation
from schemas.request_records import Claim as Claim
from schemas.request_records import Completion as Completion
from schemas.request_records import Described as Described
from schemas.request_records import Detach as Detach
from schemas.request_records import Dispatch as Dispatch
from schemas.request_records import Dispatched as Dispatched
from schemas.request_records import Duplicate as Duplicate
from schemas.request_records import Failed as Failed
from schemas.request_records import Idempotency as Idempotency
from schemas.request_records import InferenceRequest as InferenceRequest
from schemas.request_records import KeyedRequest as KeyedRequest
from schemas.request_records import Pairing as Pairing
from schemas.request_records import RateLimit as RateLimit
from schemas.request_records import Rejected as Rejected
from schemas.request_records import Restate as Restate
from schemas.request_records import RestatedRequest as RestatedRequest
from schemas.request_records import Retry as Retry
from schemas.request_records import Usage as Usage
from schemas.sampling import Grammar as Grammar
from schemas.sampling import LogitBias as LogitBias
from schemas.sampling import SamplingParams as SamplingParams
from schemas.sampling import TokenLogprobs as TokenLogprobs
from schemas.token_records import Tokens as Tokens
