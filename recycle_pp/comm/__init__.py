"""Messages and sums between workers. They end with LinkBroken when a worker dies, and continue in the next generation.

links         interface of the executor: send, receive, all-reduce of one generation, abort from any thread
transport     interface of a back end of links; waiting: a generation, a pending operation, LinkBroken
  tcp/        the CPU's back end: one connection per pair of workers, which survives the death of a third
  groups      groups rebuilt in each generation, one with each neighbour: gloo/ or nccl/
  staging     either of them between GPUs, through host memory
collectives   all-reduce and broadcast built from messages
store         rendezvous of workers, over the control connections
replay_log    tensors sent in uncommitted steps
transfer      the state of a rejoining worker
torch_backend/    torch.distributed's backend "recycle", for other users of process groups
torch_internals   all undocumented behaviour of torch on which the package depends
"""
