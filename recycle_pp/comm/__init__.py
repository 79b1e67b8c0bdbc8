"""Messages and sums between workers. Operations raise LinkBroken when a worker dies. The next generation (the next
membership of the job) continues.

links         the executor's interface: send, receive and all-reduce in one generation; abort from any thread
transport     the interface of a back end of links
waiting       a generation, a pending operation, LinkBroken
  tcp/        the back end for CPUs: one connection per pair of workers, which survives the death of other workers
  groups      the back ends gloo/ and nccl/: groups, one with each neighbour, kept over a death if they are idle
  staging     runs TCP or Gloo between GPUs, through host memory
collectives   all-reduce, reduce and broadcast built from messages
store         rendezvous of workers, over the control connections
replay_log    tensors sent in uncommitted steps
transfer      sends the state to a rejoining worker
torch_backend/    the backend "recycle" of torch.distributed, for programs that use process groups
torch_internals   all undocumented behaviour of torch on which the package depends
"""
