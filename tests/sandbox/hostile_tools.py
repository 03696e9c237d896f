"""Tools that misbehave. Read as text and run in the sandbox; never imported.

An attack that was stopped returns None or raises; one that got through returns a line that says what it reached.
"""

import builtins
import ctypes
import gc
import json
import os
import queue
import resource
import signal
import socket
import struct
import sys
import threading
import time

CHANNEL = 3
REPORT = struct.Struct("!BI")


def innocent(number=1):
    return {"doubled": 2 * number, "text": json.dumps([True, None]), "length": len("sandbox")}


# --- multiplication


def fork_bomb():
    children = 0
    for _ in range(1000):
        try:
            if os.fork() == 0:
                os._exit(0)
            children += 1
        except OSError:
            pass
    return f"{children} forks" if children else None


def run_program():
    import subprocess

    subprocess.run(["/bin/sh", "-c", "id"], check=True)
    return "ran a program"


def leave_a_daemon():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    return "left a daemon"


def thread_bomb():
    started = 0
    for _ in range(100):
        try:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            started += 1
        except RuntimeError:
            pass
    return f"{started} threads" if started else None


# --- exhaustion


def spin():
    while True:
        pass


def spin_and_ignore_the_limit():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    spin()


def spin_in_c():
    return len(b"a" * 40 if __import__("re").match(r"(a+)+$", "a" * 40 + "b") else b"")


def spin_just_past_the_limit():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) < 1.3:  # of user and system: the limit counts both
        pass
    return "outlived the CPU limit"


def sleep_for_ever():
    time.sleep(10**6)
    return None  # the clock is virtual: sleeping takes no time


def wait_for_ever():
    threading.Lock().acquire()
    threading.Event().wait()


def work_a_little_then_wait():
    """So that it looks like one that a busy machine kept from its work."""
    for _ in range(3_000_000):  # a tenth of a second at least
        pass
    queue.Queue().get()


def wait_by_system_calls():
    """What takes time and no processor: pauses, polls, pipes, the kernel's grace periods, a disk."""
    import select

    libc = ctypes.CDLL(None, use_errno=True)
    membarrier = {"x86_64": 324, "aarch64": 283}[os.uname().machine]

    def refuse(result):
        if result < 0:
            raise OSError(ctypes.get_errno(), "refused")

    attempts = {
        "usleep": lambda: refuse(libc.usleep(1_000)),
        "poll": lambda: select.poll().poll(1),
        "select": lambda: select.select([], [], [], 0.001),
        "epoll": lambda: select.epoll(),
        "pipe": os.pipe,
        "membarrier": lambda: refuse(libc.syscall(membarrier, 1, 0)),
        "yield": os.sched_yield,
        "disk": lambda: os.open(os.__file__, os.O_RDONLY | os.O_DIRECT),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        return f"waits by {name}"
    return None


def move_pages_of_libraries():
    """Out of memory for all that map them, or together with equal ones of others; or ask whether they are in use."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(ctypes.cast(libc.getpid, ctypes.c_void_p).value & -(1 << 14))
    for advice in (12, 20, 21):  # MADV_MERGEABLE, MADV_COLD, MADV_PAGEOUT
        if libc.madvise(page, 1 << 14, advice) == 0 or ctypes.get_errno() != 1:
            return f"advice {advice} was taken (errno {ctypes.get_errno()})"
    if libc.mincore(page, 1 << 14, ctypes.create_string_buffer(4)) == 0:
        return "saw what is in memory"
    return None


def take_memory_at_once():
    return f"took {len(bytearray(4 << 30))}"


def take_memory_slowly():
    hoard = []
    while True:
        hoard.append(bytearray(1 << 20))


def leave_shared_memory():
    """A limit of address space counts mappings, and pages of shared memory stay where a mapping has shrunk."""
    import mmap

    hoard, chunk = [], b"x" * (1 << 20)
    for _ in range(64):
        hoard.append(mmap.mmap(-1, 100 << 20))
        for _ in range(100):
            hoard[-1].write(chunk)
        hoard[-1].resize(4096)
    return "took 6 GiB"


def share_by_system_calls():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    for flags in (0x21, 0x23):  # MAP_ANONYMOUS with MAP_SHARED, and with MAP_SHARED_VALIDATE
        if libc.mmap(None, ctypes.c_size_t(1 << 20), 3, flags, -1, ctypes.c_long(0)) != ctypes.c_void_p(-1).value:
            return f"mapped with flags {flags:#x}"
    private = libc.mmap(None, ctypes.c_size_t(1 << 20), 3, 0x22, -1, ctypes.c_long(0))
    return "mapped nothing at all" if private == ctypes.c_void_p(-1).value else None


def recurse():
    sys.setrecursionlimit(10**9)

    class Deep:
        def __repr__(self):
            return repr(self)

    return repr(Deep())


def endless_generator():
    return list(iter(int, 1))


def print_without_end():
    for _ in range(10_000):
        print("x" * 1000)
    return None


def write_to_stdout_descriptor():
    for _ in range(1000):
        os.write(1, b"x" * (1 << 16))
        os.write(2, b"x" * (1 << 16))
    return None


def return_too_much():
    return "x" * (4 << 20)


def open_many_files():
    kept = []
    try:
        while len(kept) < 10_000:
            kept.append(open(os.__file__))  # noqa: SIM115
    except OSError:
        return None
    return f"{len(kept)} open files"


# --- reading and writing


def read_host_files():
    for path in ("/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/self/maps", "/proc/1/mem", "/dev/mem"):
        try:
            with open(path, "rb") as file:
                return f"{path}: {file.read(16)!r}"
        except OSError:
            pass
    return None


def list_directories():
    for path in ("/etc", "/proc", "/root", "/home", "/var", "/tmp", "/dev"):
        try:
            return f"{path}: {os.listdir(path)}"
        except OSError:
            pass
    return None


def write_files():
    for place in ("/", "/tmp", "/var/tmp", "/dev/shm", "/etc", os.path.dirname(os.__file__)):
        for action in (lambda p: open(p, "w").close(), os.mkdir, lambda p: os.symlink("/etc", p), os.mkfifo):
            try:
                action(os.path.join(place, "left-behind"))
                return f"wrote to {place}"
            except OSError:
                pass
    return None


def link_files():
    for source in ("/etc/passwd", os.__file__):
        for make in (os.symlink, os.link):
            try:
                make(source, "/tmp/linked")
                return f"linked {source}"
            except OSError:
                pass
    return None


def read_environment():
    found = sorted(set(os.environ) - {"PATH", "TZ", "LC_CTYPE"})
    return f"{found}" if found else None


# --- network


def open_sockets():
    for name in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_PACKET", "AF_ALG"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                socket.socket(getattr(socket, name), kind)
                return f"{name}"
            except OSError:
                pass
    try:
        socket.socketpair()
        return "socketpair"
    except OSError:
        return None


# --- other processes


def kill_everybody():
    for target in (0, os.getppid(), 1, 2, 3, -1, *range(4, 400)):
        try:
            os.kill(target, signal.SIGKILL)
            return f"killed {target}"
        except OSError:
            pass
    return None


def trace_and_read_others():
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(64)

    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here, there = Vector(ctypes.addressof(buffer), 64), Vector(id(buffer), 64)
    for pid in (1, libc.getppid()):
        if libc.ptrace(16, pid, 0, 0) >= 0:
            return f"traces {pid}"
        if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) >= 0:
            return f"reads {pid}"
    return None


def own_signals_to_others():
    import fcntl

    fcntl.fcntl(CHANNEL, 8, -1)  # F_SETOWN: have the kernel send SIGIO for us
    return "owns a pipe's signals"


# --- the kernel's surface


def privileged_system_calls():
    libc = ctypes.CDLL(None, use_errno=True)
    attempts = {
        "unshare": lambda: libc.unshare(0x10000000),
        "mount": lambda: libc.mount(b"none", b"/", b"tmpfs", 0, None),
        "setuid": lambda: libc.setresuid(0, 0, 0),
        "chroot": lambda: libc.chroot(b"/"),
        "prctl": lambda: libc.prctl(38, 1, 0, 0, 0),
        "personality": lambda: libc.personality(0xFFFFFFFF),
        "sethostname": lambda: libc.sethostname(b"mine", 4),
        "pidfd_send_signal": lambda: libc.syscall(424, 0, 0, 0, 0),
        "io_uring_setup": lambda: libc.syscall(425, 1, ctypes.create_string_buffer(256)),
        "open_tree": lambda: libc.syscall(428, -100, b"/", 0),
        "pidfd_open": lambda: libc.syscall(434, 1, 0),
        "landlock": lambda: libc.syscall(444, None, 0, 1),
        "memfd_secret": lambda: libc.syscall(447, 0),
    }
    for name, attempt in attempts.items():
        ctypes.set_errno(0)
        if attempt() >= 0 or ctypes.get_errno() not in (1, 38):
            return f"{name}: errno {ctypes.get_errno()}"
    return None


def foreign_abi():
    import mmap

    code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (i386 getpid); int 0x80; ret
    prot = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=prot)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return f"i386 getpid says {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"


def raise_limits():
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        try:
            resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return f"lifted {name}"
        except (OSError, ValueError):
            pass
    return None


def segfault():
    ctypes.string_at(0)


def abort():
    os.abort()


# --- lies


def exit_with_success():
    print('{"value": "forged"}')
    os._exit(0)


def sys_exit():
    sys.exit(0)


def close_the_channel_and_stay():
    os.close(CHANNEL)
    spin()


def forge_and_return():
    body = b'{"value":"forged","stdout":""}'
    os.write(CHANNEL, REPORT.pack(0, len(body)) + body)
    return "forged twice"


def write_junk():
    os.write(CHANNEL, b"\xff" * 100)
    os._exit(0)


def write_half_a_report():
    os.write(CHANNEL, REPORT.pack(0, 1000) + b"{")
    os._exit(0)


def forge(body):
    os.write(CHANNEL, REPORT.pack(0, len(body)) + body)
    os._exit(0)


def forge_nan():
    forge(b'{"value":NaN,"stdout":""}')


def forge_infinity():
    forge(b'{"value":1e999,"stdout":""}')


def forge_deep_nesting():
    forge(b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b',"stdout":""}')


def forge_surrogate():
    forge(b'{"value":"\\ud800","stdout":""}')


def forge_huge_integer():
    forge(b'{"value":' + b"9" * 100_000 + b',"stdout":""}')


def forge_other_fields():
    forge(b'{"value":1,"stdout":"","kind":"ok"}')


def flood_the_channel():
    while True:
        os.write(CHANNEL, b"x" * (1 << 16))


def write_to_every_descriptor():
    for descriptor in range(4, 1024):
        try:
            os.write(descriptor, b"x")
            return f"wrote to descriptor {descriptor}"
        except OSError:
            pass
    return None


# --- results that are not JSON


def return_nan():
    return {"x": float("nan")}


def return_infinity():
    return [float("inf")]


def return_surrogate():
    return "\ud800"


def return_huge_integer():
    return 10**5000


def return_generator():
    return (n for n in range(2))


def return_cycle():
    cycle = []
    cycle.append(cycle)
    return cycle


def return_deep_list():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    return deep


# --- poison for the next call


def poison():
    import __main__

    json.dumps = json.JSONEncoder.encode = lambda *a, **k: '"poisoned"'
    builtins.len = lambda x: 666
    sys.modules["json"] = None
    for module in gc.get_objects():
        if isinstance(module, dict) and "innocent" in module:
            module["innocent"] = None
    __main__.__dict__.clear()
    gc.collect()
    return None


# --- more of the kernel's surface, by number: (x86-64, arm64)

_NUMBERS = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "process_vm_writev": (311, 271),
    "setns": (308, 268),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "memfd_create": (319, 279),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "timer_create": (222, 107),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "flock": (73, 32),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "vmsplice": (278, 75),
    "io_uring_enter": (426, 426),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "process_madvise": (440, 440),
}


def _refused(names):
    import platform

    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    for name in names:  # EPERM, ENOSYS, or as for a fork beyond the limit EAGAIN
        ctypes.set_errno(0)
        if libc.syscall(_NUMBERS[name][column], 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 11, 38):
            return f"{name}: errno {ctypes.get_errno()}"
    return None


def start_processes_by_number():
    return _refused(["clone", "clone3", "execve", "execveat"])


def reach_processes_by_number():
    return _refused(["tgkill", "rt_sigqueueinfo", "process_vm_writev", "setns", "process_madvise"])


def use_keyrings():
    return _refused(["add_key", "keyctl"])


def load_kernel_code():
    return _refused(["init_module", "finit_module", "kexec_load", "bpf", "perf_event_open"])


def use_shared_memory_and_queues():
    return _refused(["shmget", "msgget", "semget", "mq_open", "memfd_create"])


def use_exotic_descriptors():
    names = ["userfaultfd", "fanotify_init", "inotify_init1", "open_by_handle_at", "vmsplice", "io_uring_enter"]
    return _refused([*names, "fsopen", "mount_setattr"])


def administer_the_machine():
    return _refused(["swapon", "reboot", "syslog", "acct", "timer_create", "flock", "setpriority", "sched_setaffinity"])


def set_the_clock():
    import time

    libc = ctypes.CDLL(None, use_errno=True)
    value = (ctypes.c_long * 2)(1, 0)
    if libc.settimeofday(value, None) >= 0 or libc.clock_settime(0, value) >= 0:
        return "set the clock"
    try:
        time.clock_settime(time.CLOCK_REALTIME, 1.0)
        return "set the clock through time"
    except OSError:
        return None


def read_memory_through_proc():
    for path in ("/proc/self/mem", "/proc/1/mem", "/proc/self/maps", "/proc/thread-self/environ", "/dev/mem"):
        try:
            with open(path, "rb"):
                return path
        except OSError:
            pass
    return None


def flood_inodes():
    made = 0
    for i in range(20_000):
        for place in ("/tmp", "/dev/shm", "/"):
            try:
                os.close(os.open(f"{place}/{i}", os.O_CREAT | os.O_WRONLY))
                made += 1
            except OSError:
                pass
    return f"made {made} files" if made else None


# --- what runs after the tool


def survive_the_exit():
    os._exit = lambda status: None
    return None


def outlive_the_exit_hooks():
    import atexit
    import threading

    atexit.register(lambda: os.write(3, b"late"))
    threading._register_atexit(lambda: os.write(3, b"later"))
    sys.exitfunc = lambda: os.write(3, b"latest")
    return None


def tamper_with_the_writer():
    real = os.write
    os.write = lambda descriptor, data: real(descriptor, b"!" + bytes(data))
    return None


class _Evil(Exception):
    def __str__(self):
        while True:
            pass


def raise_what_cannot_be_printed():
    raise _Evil


def raise_a_huge_message():
    raise type("E" * 1_000_000, (Exception,), {})("x" * 50_000_000)


class _Endless(dict):
    def items(self):
        while True:
            yield "key", "value"

    def __len__(self):
        return 1


def return_endless_dict():
    return _Endless(a=1)


class _Loop(list):
    def __iter__(self):
        while True:
            yield 0


def return_endless_list():
    return _Loop([1])


def change_time_and_chance():
    import datetime
    import random
    import time

    time.time = lambda: 0.0
    random.seed = random.random = lambda *a: 0.5
    datetime.datetime = None
    return None


def replace_the_decoder():
    import marshal

    marshal.loads = json.loads = json.JSONDecoder.decode = json.JSONDecoder.raw_decode = None
    return None


# --- its own outcome


def _end_with(kind, body):
    text = json.dumps(body).encode()
    os.write(CHANNEL, REPORT.pack(kind, len(text)) + text)
    os._exit(0)


def forge_divergence():
    _end_with(8, {"error": "as if the machine were to blame", "stdout": ""})


def forge_a_long_result():
    _end_with(0, {"value": "x" * 260_000 + "y" * 4_000, "stdout": ""})


def forge_long_output():
    _end_with(0, {"value": None, "stdout": "x" * 20_000})


def forge_a_long_error():
    _end_with(5, {"error": "x" * 20_000, "stdout": ""})


# --- what another process could see


def set_flags_of_shared_files():
    import fcntl

    for number in (0, 1, 2):
        try:
            fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
        except PermissionError:
            continue
        return f"changed descriptor {number}"
    return None


def wake_on_shared_pages():
    """Waiters of other processes on a page of a library, the same for all that map it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
    page = ctypes.cast(libc.getpid, ctypes.c_void_p).value & -8
    woken = libc.syscall(number, ctypes.c_void_p(page), 1, 1, None, None, 0)
    return None if woken < 0 and ctypes.get_errno() == 1 else f"futex answered {woken}"


def arm_a_timer():
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
    except OSError:
        return None
    return f"a timer of the machine's clock: {signal.getitimer(signal.ITIMER_REAL)}"


def open_for_writing():
    folder = os.path.dirname(os.__file__)
    for flags in (os.O_RDONLY | os.O_TRUNC, os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TMPFILE | os.O_RDWR):
        try:
            os.open(folder, flags)  # a directory: never emptied nor written
        except PermissionError:
            continue
        except OSError as error:
            return f"{flags:o}: the kernel was asked ({error.strerror})"
        return f"{flags:o}: opened"
    return None
