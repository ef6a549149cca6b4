"""A daemon and its clients in two network namespaces: what another machine gets over TLS, and what it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from localrun.access.keys import REQUESTS, KeyFile, Limit
from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH

OUTSIDE, INSIDE = "10.231.77.1", "10.231.77.2"
TIMEOUT_S = 120
_HERE = f"{os.getpid() % 10_000}"
SERVER, CLIENT = f"lrs{_HERE}", f"lrc{_HERE}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    """Two that are connected by a cable."""
    if sys.platform != "linux" or not shutil.which("ip"):
        pytest.skip("needs Linux and iproute2")
    try:
        ip("netns", "add", SERVER)
        ip("netns", "add", CLIENT)
        ip("link", "add", f"a{_HERE}", "netns", SERVER, "type", "veth", "peer", "name", f"b{_HERE}", "netns", CLIENT)
    except subprocess.CalledProcessError as error:
        for name in (SERVER, CLIENT):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        for name, link, address in ((SERVER, f"a{_HERE}", OUTSIDE), (CLIENT, f"b{_HERE}", INSIDE)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in (SERVER, CLIENT):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@dataclass
class Other:
    """The other machine: runs programs there, with a home of its own."""

    home: Path
    key: str
    port: int
    fingerprint: str
    certificate: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {"LOCALRUN_HOME": str(self.home), "HOME": str(self.home), "LOCALRUN_API_KEY": self.key}
        return subprocess.run(
            ["ip", "netns", "exec", CLIENT, *command], capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, env=os.environ | own | self.variables | variables,
        )  # fmt: skip

    def localrun(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        where = ("--host", OUTSIDE, "--port", str(self.port))
        return self.run(sys.executable, "-m", "localrun", *where, *arguments, **variables)

    def by_name(self, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "localrun", "--host", host, *arguments)

    def python(self, code: str) -> str:
        """What the code prints; it finds `URL`, `KEY` and `CERTIFICATE`."""
        names = f"URL = 'https://{OUTSIDE}:{self.port}'; KEY = {self.key!r}; CERTIFICATE = {str(self.certificate)!r}\n"
        done = self.run(sys.executable, "-c", names + code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def trusts(self) -> None:
        done = self.localrun("hosts", "trust", OUTSIDE, "--port", str(self.port), "--fingerprint", self.fingerprint)
        assert done.returncode == 0, done.stderr


@contextmanager
def sharing(folder: Path) -> Iterator[tuple[Daemon, Other]]:
    home = folder / "server"
    text = KeyFile(home / "data").create("laptop", limits=(Limit(REQUESTS, 1000, 60.0),)).text
    within = ("ip", "netns", "exec", SERVER)
    with running_daemon("--host", "0.0.0.0", within=within, LOCALRUN_HOME=str(home)) as daemon:
        assert daemon.process.stdout is not None
        invitation = daemon.process.stdout.readline()
        assert "https://" in invitation
        fingerprint = daemon.process.stdout.readline().split()[-1]
        certificate = home / "data" / "tls" / "certificate.pem"
        yield daemon, Other(folder / "client", text, daemon.port, fingerprint, certificate)


@pytest.fixture(scope="module")
def one_daemon(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Other]]:
    with sharing(tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest.fixture
def shared(one_daemon: tuple[Daemon, Other], tmp_path: Path) -> tuple[Daemon, Other]:
    """The daemon of all tests that neither attack it nor cut its network, and a machine that it has not seen yet."""
    daemon, other = one_daemon
    return daemon, replace(other, home=tmp_path / "client")


@pytest.fixture
def alone(namespaces: None, tmp_path: Path) -> Iterator[tuple[Daemon, Other]]:
    with sharing(tmp_path) as found:
        yield found


def test_the_commands_of_localrun_trust_once_and_then_work(shared: tuple[Daemon, Other]) -> None:
    _, other = shared
    new = other.localrun("ps")
    assert new.returncode == 4
    assert other.fingerprint in new.stderr
    wrong = other.localrun("hosts", "trust", OUTSIDE, "--port", str(other.port), "--fingerprint", "00:11")
    assert wrong.returncode != 0
    other.trusts()
    assert other.localrun("ps").returncode == 0
    answer = other.localrun("run", "tiny", "hi")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    used = json.loads(other.localrun("usage", "--json").stdout)
    assert [row["name"] for row in used["rows"]] == ["laptop"]
    without = other.localrun("ps", LOCALRUN_API_KEY="")
    assert without.returncode == 1
    assert "LOCALRUN_API_KEY" in without.stderr


def test_another_certificate_is_refused_with_the_way_out(shared: tuple[Daemon, Other]) -> None:
    _, other = shared
    other.trusts()
    path = other.home / "data" / "hosts.json"
    known = json.loads(path.read_text())
    [(name, host)] = known["hosts"].items()
    stranger = other.run(
        sys.executable, "-c",
        "from pathlib import Path; from localrun.access.certificate import kept; "
        f"print(kept(Path({str(other.home)!r}), []).certificate.read_text())",
    ).stdout  # fmt: skip
    known["hosts"][name] = {"certificate": stranger, "fingerprint": "AA"}
    path.write_text(json.dumps(known))
    refused = other.localrun("ps")
    assert refused.returncode == 4
    assert "is not the one that was trusted" in refused.stderr
    assert f"--fingerprint {host['fingerprint']}" in refused.stderr


def test_real_clients_with_the_certificate_as_their_authority(shared: tuple[Daemon, Other]) -> None:
    """Each gets its own error over its limits, and with its own retries an answer."""
    _, other = shared
    hourly = KeyFile(other.certificate.parents[1]).create("hourly", limits=(Limit(REQUESTS, 1, 3600.0),)).text
    quick = KeyFile(other.certificate.parents[1]).create("quick", limits=(Limit(REQUESTS, 1, 2.0),)).text
    said = other.python(
        f"hourly, quick = {hourly!r}, {quick!r}\n"
        "import httpx, httpx2, openai, anthropic, ollama, ssl\n"
        "http = lambda kind: kind.Client(verify=ssl.create_default_context(cafile=CERTIFICATE), timeout=60)\n"
        "chat = dict(model='tiny', messages=[{'role': 'user', 'content': 'hi'}], max_tokens=4)\n"
        "def of_openai(key, retries):\n"
        "    client = openai.OpenAI(base_url=URL + '/v1', api_key=key, http_client=http(httpx), max_retries=retries)\n"
        "    return client.chat.completions.create(**chat).usage.completion_tokens\n"
        "def of_anthropic(key, retries):\n"
        "    client = anthropic.Anthropic(base_url=URL, api_key=key, http_client=http(httpx2), max_retries=retries)\n"
        "    return client.messages.create(**chat).usage.output_tokens\n"
        "print(of_openai(hourly, 0))\n"
        "for ask in (of_openai, of_anthropic):\n"
        "    try:\n"
        "        print(ask(hourly, 0))\n"
        "    except (openai.RateLimitError, anthropic.RateLimitError) as error:\n"
        "        print(type(error).__module__.partition('.')[0], int(error.response.headers['retry-after']) > 3000)\n"
        "try:\n"
        "    client = ollama.Client(URL, headers={'authorization': 'Bearer ' + hourly}, verify=CERTIFICATE)\n"
        "    print(client.chat('tiny', chat['messages']))\n"
        "except ollama.ResponseError as error:\n"
        "    print('ollama', error.status_code)\n"
        "print([ask(quick, 5) for ask in (of_openai, of_anthropic) * 2])\n"
        "try:\n"
        "    of_openai('no', 0)\n"
        "except openai.AuthenticationError as error:\n"
        "    print(error.code)\n"
        "client = ollama.Client(URL, headers={'authorization': 'Bearer ' + KEY}, verify=CERTIFICATE)\n"
        "print(client.chat('tiny', chat['messages'], options={'num_predict': 4}).done)\n"
    )
    assert said.splitlines() == [
        "4", "openai True", "anthropic True", "ollama 429", "[4, 4, 4, 4]", "invalid_api_key", "True",
    ]  # fmt: skip


def test_addresses_that_the_daemon_gives_are_encrypted(shared: tuple[Daemon, Other]) -> None:
    """Anthropic's client sends its key to `results_url`, whatever that says."""
    _, other = shared
    said = other.python(
        "import anthropic, httpx2, ssl, time\n"
        "http = httpx2.Client(verify=ssl.create_default_context(cafile=CERTIFICATE), timeout=60)\n"
        "client = anthropic.Anthropic(base_url=URL, api_key=KEY, http_client=http)\n"
        "params = dict(model='tiny', messages=[{'role': 'user', 'content': 'hi'}], max_tokens=4)\n"
        "batch = client.messages.batches.create(requests=[{'custom_id': 'one', 'params': params}])\n"
        "while batch.processing_status != 'ended':\n"
        "    time.sleep(0.1)\n"
        "    batch = client.messages.batches.retrieve(batch.id)\n"
        "print(batch.results_url.startswith(URL))\n"
        "print([one.result.type for one in client.messages.batches.results(batch.id)])\n"
        "page = http.get(URL + '/docs', headers={'x-api-key': KEY}).text\n"
        "print(URL in page, URL.replace('https', 'http') in page)\n"
    )
    assert said.splitlines() == ["True", "['succeeded']", "True False"]


@contextmanager
def named(folder: Path) -> Iterator[tuple[Daemon, Other]]:
    """A daemon on a machine called studio, which announces itself. No resolver knows its name."""
    pytest.importorskip("zeroconf")
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    home = folder / "server"
    text = KeyFile(home / "data").create("laptop").text
    within = ("ip", "netns", "exec", SERVER, "unshare", "--uts", "sh", "-c", 'hostname studio && exec "$@"', "sh")
    arguments = ("--host", "::", "--announce", "on")
    with running_daemon(*arguments, within=within, LOCALRUN_HOME=str(home)) as daemon:
        assert daemon.process.stdout is not None
        assert "https://studio.local:" in daemon.process.stdout.readline()
        fingerprint = daemon.process.stdout.readline().split()[-1]
        other = Other(folder / "client", text, daemon.port, fingerprint, home / "data" / "tls" / "certificate.pem")
        for _ in range(20):  # it looks first whether the name is free
            done = other.by_name("studio.local", "hosts", "trust", "studio.local", "--fingerprint", fingerprint)
            if done.returncode == 0:
                break
        assert done.stdout == f"studio.local:{daemon.port} is trusted\n", done.stderr
        yield daemon, other


@pytest.fixture(scope="module")
def studio(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Other]]:
    with named(tmp_path_factory.mktemp("studio")) as found:
        yield found


def test_a_name_that_only_mdns_knows_and_the_port_that_it_announces(studio: tuple[Daemon, Other]) -> None:
    daemon, other = studio
    assert "studio.local" in other.run("openssl", "x509", "-in", str(other.certificate), "-noout", "-text").stdout
    for host in ("studio.local", "Studio.local.", f"studio.local:{daemon.port}", "https://studio.local/"):
        listed = other.by_name(host, "list")
        assert listed.returncode == 0, listed.stderr
        assert "tiny" in listed.stdout
    listed = other.run(sys.executable, "-m", "localrun", "list", OLLAMA_HOST="studio.local")
    assert "tiny" in listed.stdout
    answer = other.by_name("studio.local", "run", "tiny", "hi")
    assert answer.stdout.strip(), answer.stderr
    without = other.run(
        sys.executable, "-c", "import sys; sys.modules['zeroconf'] = None; from localrun.__main__ import main; main()",
        "--host", "studio.local", "list",
    )  # fmt: skip
    assert without.returncode == 4
    assert "pip install 'localrun[mdns]'" in without.stderr
    nobody = other.by_name("nobody.local", "list")
    assert nobody.returncode == 4
    assert "--announce on" in nobody.stderr


# Says ten times a second that there is a daemon whose name has control characters in it, and one at port 0.
WRONG_NAMES = f"""
import socket, struct, time
def name(*parts): return b"".join(bytes([len(part)]) + part for part in parts) + bytes(1)
def row(owner, kind, data): return owner + struct.pack(">HHIH", kind, 1, 120, len(data)) + data
service = name(b"_localrun", b"_tcp", b"local")
rows = [row(service, 12, name(b"a\\x1b[31mred", b"_localrun", b"_tcp", b"local"))]
one = name(b"zero", b"_localrun", b"_tcp", b"local")
rows += [row(service, 12, one), row(one, 33, struct.pack(">HHH", 0, 0, 0) + name(b"studio", b"local")),
         row(one, 16, bytes(1))]
packet = struct.pack(">HHHHHH", 0, 0x8400, 0, len(rows), 0, 0) + b"".join(rows)
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
link.bind(("", 5353))
link.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton({OUTSIDE!r}))
link.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
while True:
    link.sendto(packet, ("224.0.0.251", 5353))
    print(flush=True)
    time.sleep(0.1)
"""


def test_somebody_with_a_wrong_name_hides_nobody(studio: tuple[Daemon, Other], tmp_path: Path) -> None:
    daemon, other = studio
    command = ["ip", "netns", "exec", SERVER, sys.executable, "-c", WRONG_NAMES]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline()
            # Of a machine that has trusted nobody yet.
            listed = replace(other, home=tmp_path / "new").by_name("studio.local", "hosts", "--seconds", "3")
            assert other.by_name("studio.local", "list").returncode == 0
        finally:
            neighbour.terminate()
    assert f"studio.local:{daemon.port}" in listed.stdout
    assert OUTSIDE in listed.stdout
    assert listed.stdout.rstrip().endswith(f"no       {other.fingerprint}")
    assert "studio.local:0" not in listed.stdout
    assert listed.stderr == ""


def test_the_second_machine_of_a_name_gets_another_one(studio: tuple[Daemon, Other], tmp_path: Path) -> None:
    _, other = studio
    home = tmp_path / "second"
    KeyFile(home / "data").create("laptop")
    within = ("ip", "netns", "exec", CLIENT, "unshare", "--uts", "sh", "-c", 'hostname studio && exec "$@"', "sh")
    arguments = ("--host", "0.0.0.0", "--announce", "on")
    with running_daemon(*arguments, within=within, LOCALRUN_HOME=str(home)) as daemon:
        assert daemon.process.stdout is not None
        said = [daemon.process.stdout.readline() for _ in range(3)][-1]
        assert said == "other machines find this one as studio-2.local, because another one has its name\n"
        for _ in range(20):
            listed = other.run(sys.executable, "-m", "localrun", "hosts").stdout
            if "studio-2.local" in listed:
                break
        assert f"studio-2.local:{daemon.port}" in listed
    for _ in range(20):  # it has said goodbye
        listed = other.run(sys.executable, "-m", "localrun", "hosts").stdout
        if f"studio.local:{other.port}" in listed and OUTSIDE in listed:
            break
    assert "studio-2.local" not in listed


def test_a_name_keeps_its_machine_when_the_address_changes(studio: tuple[Daemon, Other]) -> None:
    """One client lives on: nothing that it found answers any more. A daemon looks at its addresses now and then, so
    others may hear of a new one some seconds later: this comes last of those that share one."""
    _, other = studio
    code = (
        "import asyncio, subprocess\n"
        "from localrun.access import discovery\n"
        "from localrun.client import Client\n"
        "from localrun.errors import DaemonUnreachable\n"
        "def ip(*arguments):\n"
        "    subprocess.run(['ip', *arguments], check=True)\n"
        "async def main():\n"
        f"    async with Client('https://studio.local:{other.port}') as client:\n"
        "        print(len(await client.models()), discovery.addresses('studio.local')[0])\n"
        # In a network of its own, or it would go with the other one.
        f"        ip('-n', {SERVER!r}, 'addr', 'add', '10.231.77.9/16', 'dev', 'a{_HERE}')\n"
        f"        ip('-n', {SERVER!r}, '-6', 'addr', 'flush', 'dev', 'a{_HERE}')\n"
        f"        ip('-n', {SERVER!r}, 'addr', 'del', '{OUTSIDE}/24', 'dev', 'a{_HERE}')\n"
        "        await client._daemon._http._transport._transport.aclose()\n"
        "        for _ in range(20):\n"
        "            try:\n"
        f"                print(len(await client.models()), {OUTSIDE!r} in discovery.addresses('studio.local'))\n"
        "                break\n"
        "            except DaemonUnreachable:\n"
        "                pass\n"
        "asyncio.run(main())\n"
    )
    try:
        done = other.run(sys.executable, "-c", code)
    finally:
        ip("-n", SERVER, "addr", "flush", "dev", f"a{_HERE}", "scope", "global")
        ip("-n", SERVER, "addr", "add", f"{OUTSIDE}/24", "dev", f"a{_HERE}")
        for state in ("down", "up"):  # which brings its address of IPv6 back
            ip("-n", SERVER, "link", "set", f"a{_HERE}", state)
    assert done.stdout.splitlines() == [f"1 {OUTSIDE}", "1 False"], done.stderr


@pytest.mark.slow
def test_a_network_that_is_cut_ends_the_stream_and_comes_back(alone: tuple[Daemon, Other]) -> None:
    """Nothing comes through any more, in the middle of a stream that may be silent for long."""
    _, other = alone
    other.trusts()
    admin = KeyFile(other.certificate.parents[1]).create("admin", admin=True).text
    code = (
        "import asyncio, subprocess\n"
        "from localrun import errors\n"
        "from localrun.access import discovery\n"
        "from localrun.client import Client\n"
        # Seconds instead of half a minute; without them it would be hours.
        "discovery._KEEP_ALIVE.update(TCP_KEEPIDLE=2, TCP_KEEPINTVL=1)\n"
        "discovery._USER_TIMEOUT_MS = 5_000\n"
        "def cut(verb):\n"
        f"    subprocess.run(['ip', '-n', {SERVER!r}, 'route', verb, 'blackhole', '{INSIDE}/32'], check=True)\n"
        "async def main():\n"
        f"    async with Client('https://{OUTSIDE}:{other.port}') as client:\n"
        "        try:\n"
        "            log = client.logs()\n"
        "            first = asyncio.ensure_future(anext(log))\n"
        "            await asyncio.sleep(0.5)\n"
        "            cut('add')\n"
        "            while True:\n"
        "                await (first or anext(log))\n"
        "                first = None\n"
        "        except errors.DaemonUnreachable as error:\n"
        "            print('the connection broke' in str(error) or str(error))\n"
        "        cut('del')\n"
        "        for _ in range(50):\n"
        "            try:\n"
        "                print(len(await client.models()))\n"
        "                break\n"
        "            except errors.DaemonUnreachable:\n"
        "                await asyncio.sleep(0.2)\n"
        "asyncio.run(asyncio.wait_for(main(), 110))\n"
    )
    try:
        done = other.run(sys.executable, "-c", code, LOCALRUN_API_KEY=admin)
    finally:
        subprocess.run(["ip", "-n", SERVER, "route", "del", "blackhole", f"{INSIDE}/32"], capture_output=True)
    assert done.stdout.splitlines() == ["True", "1"], done.stderr


def test_nothing_is_to_be_had_without_encryption(shared: tuple[Daemon, Other]) -> None:
    daemon, other = shared
    done = other.run("curl", "-sS", "--max-time", "10", f"http://{OUTSIDE}:{daemon.port}/health")
    assert done.returncode != 0
    assert done.stdout == ""


def test_a_page_of_another_origin_gets_nothing(shared: tuple[Daemon, Other]) -> None:
    _, other = shared
    said = other.python(
        "import httpx2, ssl\n"
        "http = httpx2.Client(verify=ssl.create_default_context(cafile=CERTIFICATE), base_url=URL, timeout=60)\n"
        "own = {'authorization': 'Bearer ' + KEY}\n"
        "for origin in ('https://evil.example', 'http://localhost:3000', 'vscode-webview://x', 'null', URL):\n"
        "    answer = http.get('/v1/models', headers=own | {'origin': origin})\n"
        "    asked = http.options('/v1/models', headers={'origin': origin, 'access-control-request-method': 'GET'})\n"
        "    granted = answer.headers.get('access-control-allow-origin')\n"
        "    print(answer.status_code, asked.status_code, granted == origin)\n"
        "for host in ('evil.example', 'localhost', '127.0.0.1', '0.0.0.0'):\n"
        "    print(http.get('/v1/models', headers=own | {'host': host}).status_code)\n"
    )
    assert said.splitlines() == ["403 403 False"] * 4 + ["200 200 True"] + ["403"] * 4


def test_programs_of_the_machine_itself_go_on_as_before(shared: tuple[Daemon, Other]) -> None:
    daemon, _ = shared
    own = {"LOCALRUN_HOME": str(daemon.home), "LOCALRUN_HOST": "0.0.0.0", "LOCALRUN_PORT": str(daemon.port)}
    for host in ("0.0.0.0", "127.0.0.1", OUTSIDE):
        done = subprocess.run(
            ["ip", "netns", "exec", SERVER, sys.executable, "-m", "localrun", "--host", host, "ps"],
            capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | own,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_wrong_keys_over_tls_slow_nobody_and_fill_nothing(alone: tuple[Daemon, Other]) -> None:
    """Some on a connection that stays, some on a new one each; `make test-deep` sends ten thousand."""
    daemon, other = alone
    process = psutil.Process(daemon.process.pid)
    warm_up = (
        "import collections, httpx2, json, ssl, threading, time\n"
        "context = ssl.create_default_context(cafile=CERTIFICATE)\n"
        "def client(): return httpx2.Client(verify=context, base_url=URL, timeout=60)\n"
        "def ask(http, key): return http.get('/v1/models', headers={'x-api-key': key}).status_code\n"
    )
    assert other.python(warm_up + "print(ask(client(), KEY))\n") == "200\n"
    before_bytes, n_descriptors = process.memory_info().rss, process.num_fds()
    said = other.python(
        warm_up + "codes = collections.Counter()\n"
        "def attack(start, n, is_new):\n"
        "    http = client()\n"
        "    for number in range(start, start + n):\n"
        "        http = client() if is_new else http\n"
        "        codes[ask(http, KEY.rpartition('_')[0] + f'_{number:043d}')] += 1\n"
        "        if is_new: http.close()\n"
        f"attackers = [threading.Thread(target=attack, args=(0, {900 * DEPTH}, False)),\n"
        f"             threading.Thread(target=attack, args=(10**6, {100 * DEPTH}, True))]\n"
        "for attacker in attackers: attacker.start()\n"
        "right = []\n"
        "http = client()\n"
        "while any(attacker.is_alive() for attacker in attackers):\n"
        "    right.append(ask(http, KEY))\n"
        "print(json.dumps([dict(codes), right.count(200), len(right)]))\n"
    )
    codes, n_right, n_asked = json.loads(said)
    assert codes.keys() <= {"401", "429"}
    assert codes["429"] > 0.9 * sum(codes.values()) == 0.9 * 1000 * DEPTH
    assert n_right == n_asked > 20, "as many as a busy machine lets through beside two attackers"
    assert process.memory_info().rss - before_bytes < 32 * 1024 * 1024
    assert process.num_fds() <= n_descriptors + 2
    audit = daemon.home / "state" / "audit.jsonl"
    assert not audit.exists() or len(audit.read_text().splitlines()) < 200


# Opens as many connections as two addresses may have, and one more from each; holds them until its input ends.
MANY = """
import socket, ssl, sys
context = ssl.create_default_context(cafile=CERTIFICATE)
context.check_hostname = False
host, port = URL.removeprefix("https://").split(":")
held, said = [], []
for source in SOURCES:
    for number in range(257):
        plain = socket.create_connection((host, int(port)), source_address=(source, 0))
        held.append(context.wrap_socket(plain))
        if number == 256:  # those before it have said nothing, and so are not idle
            held[-1].sendall(f"GET /health HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
            said.append(held[-1].recv(12).decode().split()[1])
print(*said, flush=True)
sys.stdin.read()
"""


def test_connections_from_outside_lock_out_neither_others_nor_this_machine(alone: tuple[Daemon, Other]) -> None:
    daemon, other = alone
    second = INSIDE.removesuffix("2") + "3"
    subprocess.run(["ip", "-n", CLIENT, "addr", "add", f"{second}/24", "dev", f"b{_HERE}"], check=True)
    names = f"URL, CERTIFICATE = 'https://{OUTSIDE}:{daemon.port}', {str(other.certificate)!r}\n"
    names += f"SOURCES = {INSIDE!r}, {second!r}\n"
    command = ["ip", "netns", "exec", CLIENT, sys.executable, "-c", names + MANY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdin is not None
        assert holding.stdout is not None
        try:
            assert holding.stdout.readline().split() == ["503", "503"]
            own = subprocess.run(
                ["ip", "netns", "exec", SERVER, sys.executable, "-m", "localrun", "list", "--port", str(daemon.port)],
                env=os.environ | {"LOCALRUN_HOME": str(other.certificate.parents[2])}, capture_output=True, text=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        finally:
            holding.stdin.close()
    assert own.returncode == 0, own.stderr
    assert "tiny" in own.stdout
