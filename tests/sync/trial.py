import asyncio, sys, time, torch
from pathlib import Path
from tests.worlds import make_model
from tests.servers import serving
from etude.models import load
from etude.sync.fleet import Fleet
from etude.sync.shm import ShmCarrier
from etude.sync.disk import DiskCarrier
from etude.sync.group import GroupCarrier
kind=sys.argv[1]
into=Path("/tmp/esync/trial"); into.mkdir(parents=True,exist_ok=True)
for s in (0,1,2):
    if not (into/f"m{s}").exists(): make_model(into/f"m{s}", seed=s, hidden=64)
def w(s): return list((n,t.detach()) for n,t in load(into/f"m{s}", dtype=torch.float32).named_weights())
import traceback
truth={}
t=time.time()
with serving(kind, into/"m0", into) as a:
    print("start", time.time()-t, flush=True)
    print("m0", a.says(), flush=True)
    for label, carrier in {"shm":ShmCarrier(1<<20),"shm2":ShmCarrier(1<<14),"disk":DiskCarrier(into/"d",1<<20),"gloo":GroupCarrier("gloo",1<<16,timeout=30)}.items():
        for s in (1,2):
            t=time.time()
            try:
                fleet=Fleet([a],carrier,timeout=60)
                print(label, s, asyncio.run(fleet.publish(w(s), s)).reduce(), flush=True)
                print("  ", a.says(), a.withdrawn, flush=True)
            except Exception:
                traceback.print_exc()
        carrier.close()
for s in (1,2):
    with serving(kind, into/f"m{s}", into) as b:
        print("fresh", s, b.says(), flush=True)
