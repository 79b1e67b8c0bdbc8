"""Messages and sums between workers, which end with LinkBroken when a worker dies and go on in the next generation.

links         what the executor talks through: send, receive, all-reduce of one generation, abort from any thread
transport     what links ask of a back end; waiting: a generation, an operation under way, LinkBroken
  tcp/        the CPU's own: one connection a pair of workers, which the death of a third leaves standing
  groups      groups built anew in each generation, one with each neighbour: gloo/ or nccl/
  staging     either of them between GPUs, through the memory of the host
collectives   all-reduce and broadcast made of messages
store         where workers find each other, over the control connections
replay_log    what was sent in steps that are not committed
transfer      the state of a rejoining worker
torch_backend/    torch.distributed's backend "recycle", for everything else that wants a process group
torch_internals   all that the package takes for granted of torch beyond its documentation
"""
