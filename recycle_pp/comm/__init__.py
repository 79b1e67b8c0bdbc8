"""Messages between workers that survive the death of any of them.

links        what the executor talks through: send, receive, all-reduce of one generation, abort from any thread
  gloo       on the CPU: one mesh of connections that a death leaves standing, slots that tell generations apart
    mesh     Gloo's pairs, one a pair of workers
    collectives   made of messages
    waiting  waits that another thread can end
  groups     NCCL: groups built anew in each generation, one with each neighbour
    nccl     a communicator that can be left at any time
  staging    Gloo between GPUs: through the memory of the host
store        where workers find each other, over the control connections
boundary     what was sent in steps that are not committed
transfer     the state of a rejoining worker
process_group     torch.distributed's backend "recycle", for everything else that wants a process group
abort        breaking a Gloo group's connections, and no others
rehearsal    real processes for tests and bench scripts
"""
