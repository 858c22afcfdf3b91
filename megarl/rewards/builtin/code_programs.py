"""The two programs that judge an answer by assertions: one runs the answer, the other one the tests.

They run in two sandboxes and exchange lines of JSON. The judge calls functions of the answer and gets values back:
plain data, or numbered references to objects that stay on the other side. So the answer's code is never in the process
that decides, and it sees only the arguments of the tests' calls.
"""

_WIRE = """
import decimal, fractions, json, os
MAX_LINE = 1 << 22
class Unsupported(Exception): pass
class Wire:
    def __init__(self, reading, writing, refer):
        self.reading, self.writing, self.refer = os.fdopen(reading, "rb"), writing, refer
    def send(self, message):
        data = json.dumps(message).encode() + b"\\n"
        while data:
            data = data[os.write(self.writing, data):]
    def receive(self):
        line = self.reading.readline(MAX_LINE)
        if not line.endswith(b"\\n"):
            raise EOFError("the program has ended, or sent too much")
        return json.loads(line)
    def encode(self, value):
        if value is None or isinstance(value, (bool, str)):
            return {"v": value if value is None or isinstance(value, bool) else str.__str__(value)}
        if isinstance(value, int): return {"i": hex(int(value))}
        if isinstance(value, float): return {"f": float.hex(value)}
        if isinstance(value, complex): return {"c": [float.hex(value.real), float.hex(value.imag)]}
        if isinstance(value, (bytes, bytearray)): return {"b": bytes(value).hex()}
        if isinstance(value, decimal.Decimal): return {"D": str(value)}
        if isinstance(value, fractions.Fraction): return {"F": [hex(value.numerator), hex(value.denominator)]}
        for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
            if isinstance(value, kind): return {tag: [self.encode(each) for each in value]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(each)] for key, each in value.items()]}
        return {"r": self.refer(value)}
    def decode(self, coded, dereference):
        (tag, value), = coded.items()
        if tag == "v": return value
        if tag == "i": return int(value, 16)
        if tag == "f": return float.fromhex(value)
        if tag == "c": return complex(*map(float.fromhex, value))
        if tag == "b": return bytes.fromhex(value)
        if tag == "D": return decimal.Decimal(value)
        if tag == "F": return fractions.Fraction(*(int(each, 16) for each in value))
        if tag == "d":
            return {self.decode(key, dereference): self.decode(each, dereference) for key, each in value}
        if tag == "r": return dereference(value)
        kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
        return kind(self.decode(each, dereference) for each in value)
"""

_ANSWER = """
import sys, types
reading, writing = os.dup(0), os.dup(1)
null = os.open("/dev/null", os.O_RDWR)
for descriptor in (0, 1, 2): os.dup2(null, descriptor)
objects = []
def refer(value):
    objects.append(value)
    return len(objects) - 1
wire = Wire(reading, writing, refer)
def load(source):
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)
    return module.__dict__
def serve(source):
    names, problem = {}, None
    try:
        names = load(source)
    except BaseException as error:
        problem = [type(error).__name__, str(error)[:300]]
    while True:
        try:
            request = wire.receive()
        except EOFError:
            os._exit(0)
        try:
            if problem is not None: reply = {"error": problem}
            else: reply = answer(names, **request)
        except BaseException as error:
            reply = {"error": [type(error).__name__, str(error)[:300]]}
        wire.send(reply)
def answer(names, op, target=None, name=None, args=(), kwargs=None):
    if op == "names":
        found = {each: names[each] for each in args if each in names}
        return {"value": {each: coded(value) for each, value in found.items()}}
    thing = objects[target]
    if op == "get":
        value = getattr(thing, name)
        return {"value": wire.encode(value)}
    if op == "next": return {"value": wire.encode(next(thing))}
    if op == "iter": return {"value": {"r": refer(iter(thing))}}
    if op == "len": return {"value": wire.encode(len(thing))}
    if op == "str": return {"value": wire.encode(str(thing))}
    given = [wire.decode(each, objects.__getitem__) for each in args]
    if op == "item": return {"value": wire.encode(thing[given[0]])}
    if op == "same": return {"value": wire.encode(bool(thing == given[0]))}
    named = {key: wire.decode(each, objects.__getitem__) for key, each in (kwargs or {}).items()}
    value = wire.encode(thing(*given, **named))
    return {"value": value, "args": [wire.encode(each) for each in given]}
def coded(value):
    return {"module": value.__name__} if isinstance(value, types.ModuleType) else wire.encode(value)
serve(SOURCE)
"""

_JUDGE = """
import ast, builtins, sys
reading, writing, verdicts = os.dup(0), os.dup(1), os.dup(2)
null = os.open("/dev/null", os.O_RDWR)
for descriptor in (0, 1, 2): os.dup2(null, descriptor)
class AnswerError(Exception): pass
def refer(value):
    if isinstance(value, Remote): return object.__getattribute__(value, "_number")
    raise Unsupported(f"the tests give the answer a {type(value).__name__}; only plain data can be given")
wire = Wire(reading, writing, refer)
def ask(stop=False, **request):
    wire.send(request)
    reply = wire.receive()
    if "error" not in reply: return reply
    name, message = reply["error"]
    kind = getattr(builtins, str(name), None)
    if stop and name == "StopIteration": raise StopIteration
    # An exception that ends a loop silently would make `all(map(f, values))` hold.
    silent = (StopIteration, StopAsyncIteration, GeneratorExit)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, silent):
        raise kind(str(message))
    raise AnswerError(f"{name}: {message}")
def value_of(reply): return wire.decode(reply["value"], Remote)
class Remote:
    def __init__(self, number): self._number = int(number)
    def __call__(self, *args, **kwargs):
        reply = ask(op="call", target=self._number, args=[wire.encode(each) for each in args],
                    kwargs={key: wire.encode(each) for key, each in kwargs.items()})
        for given, coded in zip(args, reply["args"]):
            if isinstance(given, (list, dict, set)): change(given, wire.decode(coded, Remote))
        return value_of(reply)
    def __getattr__(self, name):
        if name.startswith("__") and name != "__name__": raise AttributeError(name)
        return value_of(ask(op="get", target=self._number, name=name))
    def __iter__(self):
        iterator = ask(op="iter", target=self._number)["value"]["r"]
        while True:
            try: reply = ask(stop=True, op="next", target=iterator)
            except StopIteration: return
            yield value_of(reply)
    def __next__(self): return value_of(ask(stop=True, op="next", target=self._number))
    def __len__(self): return value_of(ask(op="len", target=self._number))
    def __str__(self): return value_of(ask(op="str", target=self._number))
    def __getitem__(self, key): return value_of(ask(op="item", target=self._number, args=[wire.encode(key)]))
    def __eq__(self, other):
        # The answer must not decide whether its object equals plain data.
        if not isinstance(other, Remote): return False
        return self._number == other._number or value_of(
            ask(op="same", target=self._number, args=[{"r": other._number}])) is True
    __hash__ = object.__hash__
    def __bool__(self): return True
def change(given, after):
    if type(after) is not type(given) or given == after: return
    given.clear()
    given.extend(after) if isinstance(given, list) else given.update(after)
def wanted():
    names = {node.id for piece in PIECES for node in ast.walk(ast.parse(piece)) if isinstance(node, ast.Name)}
    return sorted(names - set(dir(builtins)))
def modules(names):
    trees = [ast.parse(piece) for piece in PIECES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    others = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    return [name for name in names if name in sys.stdlib_module_names and name not in others]
def judge():
    space = {"__name__": "tests"}
    names = wanted()
    for name in modules(names):  # the standard library's, whatever the answer defines
        space[name] = __import__(name)
        names.remove(name)
    given = ask(op="names", args=names)["value"]
    for name in names:  # only these, whatever was sent
        coded = given.get(name)
        if coded is None: continue
        if "module" in coded:
            if coded["module"] == name and name in sys.stdlib_module_names: space[name] = __import__(name)
        else: space[name] = wire.decode(coded, Remote)
    for piece in PIECES:
        try:
            exec(compile(piece, "<tests>", "exec"), space)
        except Unsupported as error: report("unsupported", str(error))
        except BaseException as error: report("failed", f"{type(error).__name__}: {error}"[:200])
        else: report("passed", "")
def report(verdict, message): os.write(verdicts, json.dumps([verdict, message]).encode() + b"\\n")
try: judge()
except BaseException as error: report("ended", f"{type(error).__name__}: {error}"[:200])
os._exit(0)
"""


def answer_program(source: str) -> str:
    """Return the program that loads an answer and serves the judge's requests."""
    return f"{_WIRE}\nSOURCE = {source!r}\n{_ANSWER}"


def judge_program(pieces: tuple[str, ...]) -> str:
    """Return the program that runs the tests and prints [verdict, message] line by line to standard error."""
    return f"{_WIRE}\nPIECES = {pieces!r}\n{_JUDGE}"
