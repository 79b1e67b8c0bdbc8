"""Messages between workers that survive the death of any of them.

links         what the executor talks through: send, receive, all-reduce of one generation, abort from any thread
transport     what links ask of a back end; waiting: a generation, an operation under way, LinkBroken
  gloo/       on the CPU: one mesh of connections that a death leaves standing, slots that tell generations apart
  groups      groups built anew in each generation, one with each neighbour, of the kind that nccl/ has
  staging     Gloo between GPUs: through the memory of the host
store         where workers find each other, over the control connections
replay_log    what was sent in steps that are not committed
transfer      the state of a rejoining worker
torch_backend/   torch.distributed's backend "recycle", for everything else that wants a process group
"""
