"""What is done only because XLA's CPU backend is as it is. On TPUs and GPUs none of this runs: skip the room.

`programs` holds one hook for each trick in the compiled programs; the code that calls one reads plainly without it.
`environment` holds what a process on CPUs is started with.
"""
