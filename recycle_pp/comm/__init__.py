"""Messages and sums between workers. When a worker dies, operations raise LinkBroken, and the job continues in the next
generation (its next membership).

links         the executor's interface: send, receive and all-reduce in one generation; abort from any thread
transport     the interface that a back end of links implements
waiting       a generation, a pending operation, LinkBroken
  tcp/        the back end for CPUs: one connection per pair of workers, which survives the death of other workers.
              Builds all-reduce, reduce and broadcast from messages
  groups      the back ends gloo/ and nccl/: one group with each neighbour, kept after a death if it is idle
  staging     runs TCP or Gloo between GPUs, through host memory
store         rendezvous of workers, over the control connections
replay_log    tensors sent in uncommitted steps
transfer      sends the state to a rejoining worker
torch_backend/    torch.distributed's backend "recycle", for programs that use process groups
torch_internals   all undocumented torch behaviour on which the package depends
"""
