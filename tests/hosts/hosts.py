"""Hosts in network namespaces, for tests of runs on several hosts: each has its own network, name and mounts.

enter() starts the calling script again in namespaces of its own, in which Hosts makes the others. They need no clean-up: the kernel
removes them, with all processes and mounts in them, when the script ends or is killed."""
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time

SKIPPED = 4  # kSkippedCode of tests/support/skip.h
SHARED, LOCAL = "/mnt/shared", "/mnt/local"  # a folder that all hosts share, and one that each has for itself
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOGIN = {"HOME": "/root", "PATH": PATH, "OMP_NUM_THREADS": "1"}  # the environment of a login


def enter():
    """Starts this script again where it may make hosts. Ends it with SKIPPED where it may not."""
    if os.environ.pop("TRIAD_IN_LAB", None):
        subprocess.run("ip link set lo up && mount -t tmpfs lab /mnt && mkdir /mnt/shared /mnt/local", shell=True, check=True)
        return
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        skip(f"this machine lacks {', '.join(missing)}")
    # --kill-child: the script is process 1 of a namespace, which ends with it, and it ends with this process.
    unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid() != 0:
        unshare.insert(1, "--map-root-user")
    probe = "ip link add v0 type veth peer name v1 && ip link add br0 type bridge && mount -t tmpfs lab /mnt"
    tried = subprocess.run([*unshare, "sh", "-c", probe], capture_output=True, text=True)
    if tried.returncode != 0:
        skip(f"no network namespaces: {tried.stderr.strip().splitlines()[-1] if tried.stderr.strip() else 'unknown reason'}")
    os.environ["TRIAD_IN_LAB"] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, "-u", *sys.argv])


def skip(why):
    print(f"SKIPPED: {why}", flush=True)
    sys.exit(SKIPPED)


class Hosts:
    """The hosts named, at 10.77.0.1, .2 and so on, reachable from each other by name.

    By default they are connected by a bridge. With delay_s or loss (the share of packets that are lost), each packet goes through a process
    of this script instead. rate: a limit for each host, such as "20mbit". Use as a context manager."""

    def __init__(self, names, delay_s=0.0, loss=0.0, rate=None):
        self.names, self.holders, self.relay = list(names), {}, None
        lines = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(self.names))
        os.makedirs(f"{SHARED}/.pids", exist_ok=True)
        by_relay = delay_s > 0 or loss > 0
        tuns = []
        if not by_relay:
            sh("ip link add br0 type bridge && ip link set br0 up")
        for i, name in enumerate(self.names):
            holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "infinity"])
            self.holders[name] = holder
            wait_until(lambda: open(f"/proc/{holder.pid}/comm").read().strip() == "sleep", f"host {name}")
            with open(f"{SHARED}/.pids/{name}", "w") as file:
                file.write(str(holder.pid))
            if by_relay:
                tuns.append(open_tun(f"tun{i}"))
                sh(f"ip link set tun{i} netns {holder.pid}")
                device = f"ip link set tun{i} name eth0 mtu 9000"
            else:
                sh(f"ip link add veth{i} type veth peer name eth0 netns {holder.pid}; ip link set veth{i} master br0 up")
                device = "true"
            self.root(name, f"hostname {name} && mount -t tmpfs local {LOCAL} && mount -t tmpfs shm /dev/shm && "
                            f"printf '%s' '{lines}' > {LOCAL}/.hosts && mount --bind {LOCAL}/.hosts /etc/hosts && {device} && "
                            f"ip link set lo up && ip addr add 10.77.0.{i + 1}/24 dev eth0 && ip link set eth0 up")
            if rate:
                self.root(name, f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 100ms")
        with open(f"{SHARED}/agent", "w") as file:  # in place of ssh: AGENT HOST COMMAND...
            file.write(f"#!/bin/sh\nhost=$1; shift\nexec nsenter -t $(cat {SHARED}/.pids/$host) -n -u -m env -i HOME=/root PATH={PATH} "
                       f"TMPDIR={LOCAL} sh -c \"$*\"\n")
        os.chmod(f"{SHARED}/agent", 0o755)
        if by_relay:
            self.relay = multiprocessing.Process(target=relay, args=(tuns, delay_s, loss), daemon=True)
            self.relay.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.names:
            self.kill(name)
        if self.relay:
            self.relay.kill()
            self.relay.join()
        else:
            subprocess.run("ip link del br0; for i in 0 1 2 3 4 5 6 7; do ip link del veth$i; done", shell=True, capture_output=True)
        for entry in os.listdir(SHARED):
            path = f"{SHARED}/{entry}"
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def prefix(self, name):
        return ["nsenter", "-t", str(self.holders[name].pid), "-n", "-u", "-m"]

    def root(self, name, command):
        sh(command, self.prefix(name))

    def start(self, name, command, env, output):
        """Runs a shell command on a host; stdout and stderr go to the file `output`. The environment is that of a login by ssh, and env."""
        variables = {**LOGIN, "TMPDIR": LOCAL, **env}
        with open(output, "w") as file:
            return subprocess.Popen([*self.prefix(name), "env", "-i", *(f"{k}={v}" for k, v in variables.items()), "sh", "-c",
                                     f"cd {os.getcwd()}; {command}"], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def link(self, name, state):
        """state: up or down. A cable that is unplugged: no end notices."""
        sh(f"ip link set veth{self.names.index(name)} {state}")

    def pids(self, name):
        own = os.readlink(f"/proc/{self.holders[name].pid}/ns/net")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if int(pid) != self.holders[name].pid and os.readlink(f"/proc/{pid}/ns/net") == own:
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def lose_power(self, name):
        """All processes end, and no packet says so."""
        self.link(name, "down")
        for pid in self.pids(name):
            os.kill(pid, signal.SIGKILL)

    def kill_program(self, name):
        """Kills triad on a host."""
        for pid in self.pids(name):
            if os.readlink(f"/proc/{pid}/exe").endswith("/triad"):
                return os.kill(pid, signal.SIGKILL)
        raise RuntimeError(f"no triad on {name}")

    def kill(self, name):
        for pid in self.pids(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.holders[name].kill()
        self.holders[name].wait()


def sh(command, prefix=()):
    done = subprocess.run([*prefix, "sh", "-ec", command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def wait_until(condition, what, limit_s=60.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        time.sleep(0.01)
    raise RuntimeError(f"{what}: not within {limit_s} s")


def open_tun(name):
    TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def relay(tuns, delay_s, loss):
    """Carries IPv4 packets between the tun devices of hosts 10.77.0.1, .2 and so on: each arrives after delay_s, or is lost."""
    draw, queue, count = random.Random(1), [], 0
    poll = select.poll()
    for tun in tuns:
        poll.register(tun, select.POLLIN)
    while True:
        wait_ms = max(0.0, queue[0][0] - time.monotonic()) * 1000 if queue else 1000
        for tun, _ in poll.poll(wait_ms):
            try:
                packet = os.read(tun, 65536)
            except OSError:
                continue
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if 0 <= to < len(tuns) and draw.random() >= loss:
                count += 1
                heapq.heappush(queue, (time.monotonic() + delay_s, count, tuns[to], packet))
        while queue and queue[0][0] <= time.monotonic():
            _, _, tun, packet = heapq.heappop(queue)
            try:
                os.write(tun, packet)
            except OSError:  # the host is gone, or its queue is full: the packet is lost
                pass
