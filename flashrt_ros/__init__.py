"""Serve a robot policy as a ROS 2 node whose whole execution state can be saved and rewound.

Layers, from the bottom; each imports only what stands above it in this list:

  core      numpy and small libraries: layout, arena, seam, capsules, store, session. No ROS and
            no GPU library.
  backends  what runs a policy: host (numpy), onnx, torch, tensorrt; cuda is the device of the last
            two. Chosen by name in the policy file, imported only when chosen.
  ingest    the policy file; messages to inputs, outputs to commands. Reads messages by attribute,
            so the live node and an offline replay use the same objects. No ROS.
  runtime   steps, phases, goals, stop, guard: the policy at work, whoever brings the messages. No
            ROS.
  node      ROS wiring: lifecycle, services, the action, topics, parameters.
  clients   what calls the node: futures, py_trees behaviours, trees for BehaviorTree.CPP.
  tools     the command line: serve, replay, verify, build, inspect. Works without ROS where it can.
  demo      a simulated robot, its policy and its scenario. Nobody imports it.

Where does my change go? A new way to run a model: backends. A new message or a new term: ingest. A
new rule about when the robot may move: runtime. A new service: srv/, node/services.py, clients. A
new guarantee about bytes: core, with a check in test/conformance.

Words, one meaning each:

  buffer       a named, typed, fixed-shape array at a fixed address; role INPUT, STATE or OUTPUT, in
               DEVICE or HOST space
  arena        the one allocation per space from which all buffers are carved
  journal      a STATE buffer that only grows along one axis (a KV cache); its length is STATE too
  tick         one inference: latch inputs, run, commit
  step         one action leaving the queue; a policy without chunks has one step per tick
  boundary     all STATE after a step: the device slot of the last accepted tick, the host block of
               this step, and the inputs of an inference that was started and not yet accepted
  capsule      an immutable named boundary with id, fingerprint, parent, witness, tier
  fingerprint  where a capsule may return: meaning must be equal, exactness may be waived
  tier         where a capsule's bytes rest: DEVICE, HOST, DISK
  lineage      parent links between capsules; the root is `origin`, the boundary after configure
  session      a random number per configure
  epoch        grows by one with every restore, rollback, reset, stop, goal start, prompt change
  chunk        the actions of one tick, (horizon, action_dim)
  port, term   an INPUT or OUTPUT buffer by its public name; one piece of an observation port
  witness      the robot's measured state as latched by the boundary's tick
  goal         permission to move; hold: active, nothing published, waiting for a goal
  fresh        arrived after the restore was ordered and, in the same clock, stamped after it
  shadow       runs and reports, commands nothing
  latch record which message of each input a tick used
"""
from importlib import metadata
from pkgutil import extend_path

# The generated half (msg, srv, action) may lie in another folder: an editable install, or a
# checkout in front of an installation on sys.path.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    if name == '__version__':
        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:  # built by colcon
            return 'unknown'
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
