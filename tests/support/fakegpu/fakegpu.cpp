// A libcuda.so.1 without a GPU, for tests: streams are threads, device memory is malloc with a cap.
//
// It has what cuda.core and cuda.bindings.driver need to allocate, copy, wait and capture, and it is strict
// where the real driver is: calls need a current context, freed memory of a pool goes back to the device at
// the next synchronisation only, and an error that breaks a context is returned by every later call. Tests
// steer it through the fakegpu_* functions; FAKEGPU_DEVICES and FAKEGPU_MEM set what it starts with.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

typedef int R;
typedef unsigned long long P;
typedef std::function<void()> Work;

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NO_CONTEXT = 201, NOT_READY = 600, UNSUPPORTED = 801 };
static const size_t GRANULE = 2 << 20;  // what the driver maps at once for a pool
static const int MAX_DEVICES = 8;

// --- faults and counts ------------------------------------------------------------------------------

static std::mutex fault_lock;
struct Fault { int error, after, times; };
static std::map<std::string, Fault> faults;
static std::map<std::string, long> calls;
static std::atomic<int> broken{0}, present{1}, copy_ms{0};

static bool breaks_context(int error) { return error == 214 || (error >= 700 && error <= 721 && error != 701 && error != 713); }

static R enter(const char* name) {
    std::lock_guard<std::mutex> hold(fault_lock);
    calls[name]++;
    if (broken) return broken;
    auto it = faults.find(name);
    if (it == faults.end() || it->second.times == 0) return OK;
    if (it->second.after > 0) { it->second.after--; return OK; }
    it->second.times--;
    if (breaks_context(it->second.error)) broken = it->second.error;
    return it->second.error;
}
#define ENTER(name) do { if (R error_ = enter(name)) return error_; } while (0)
#define ENTER_WITH_CONTEXT(name) do { ENTER(name); if (!current) return NO_CONTEXT; } while (0)

// --- devices and memory -----------------------------------------------------------------------------

struct Pool { int device; uint64_t threshold, used, reserved; };
struct Device { size_t total; size_t direct; Pool standard; char context; };  // context: its address is what counts
struct Block { size_t bytes; int device; Pool* pool; };
static std::mutex memory_lock;
static Device devices[MAX_DEVICES];
static std::vector<Pool*> pools;
static std::map<P, Block> blocks;
static std::map<P, size_t> pinned;
static int visible[MAX_DEVICES], count = -1;
static thread_local Device* current = nullptr;

static long number_of(const char* name, long fallback) { const char* text = getenv(name); return text ? strtol(text, nullptr, 10) : fallback; }

static void find_devices() {
    std::lock_guard<std::mutex> hold(memory_lock);
    if (count >= 0) return;
    int there = std::min<long>(number_of("FAKEGPU_DEVICES", 1), MAX_DEVICES);
    for (int i = 0; i < there; i++) {
        devices[i].total = number_of("FAKEGPU_MEM", 1l << 30);
        devices[i].standard = Pool{i, 0, 0, 0};
        pools.push_back(&devices[i].standard);
    }
    count = 0;
    const char* list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) { for (int i = 0; i < there; i++) visible[count++] = i; return; }
    for (const char* at = list; *at;) {
        size_t length = strcspn(at, ",");
        std::string one(at, length);
        // FakeGPU i is GPU-07070707-0707-0707-0707-0707070707<i, two digits>, and MIG-... likewise
        int ordinal = one.find('-') == std::string::npos ? atoi(one.c_str()) : atoi(one.substr(one.size() - 2).c_str());
        if (one.empty() || ordinal >= there) break;
        visible[count++] = ordinal;
        at += length;
        if (*at == ',') at++;
    }
}
static Device* device_of(int number) { return number >= 0 && number < count ? &devices[visible[number]] : nullptr; }
static int number_of_device(Device* device) { for (int i = 0; i < count; i++) if (&devices[visible[i]] == device) return i; return -1; }

static size_t used_of(int physical) {
    size_t used = devices[physical].direct;
    for (auto* pool : pools) if (pool->device == physical) used += pool->reserved;
    return used;
}
static void settle(Pool* pool, uint64_t keep) {
    uint64_t needed = (pool->used + GRANULE - 1) / GRANULE * GRANULE;
    pool->reserved = std::max(needed, std::min(pool->reserved, keep));
}
static void settle_all() {
    std::lock_guard<std::mutex> hold(memory_lock);
    for (auto* pool : pools) settle(pool, pool->threshold);
}
static R take(P* out, size_t bytes, int physical, Pool* pool) {
    std::lock_guard<std::mutex> hold(memory_lock);
    size_t total = devices[physical].total;
    if (pool) {
        uint64_t wanted = std::max(pool->reserved, (pool->used + bytes + GRANULE - 1) / GRANULE * GRANULE);
        if (used_of(physical) - pool->reserved + wanted > total)
            for (auto* other : pools) if (other != pool) settle(other, 0);
        if (used_of(physical) - pool->reserved + wanted > total) return NO_MEMORY;
        pool->reserved = wanted;
        pool->used += bytes;
    } else {
        if (used_of(physical) + bytes > total) return NO_MEMORY;
        devices[physical].direct += bytes;
    }
    void* memory = nullptr;
    if (posix_memalign(&memory, 512, bytes ? bytes : 1)) return NO_MEMORY;
    blocks[(P)memory] = Block{bytes, physical, pool};
    *out = (P)memory;
    return OK;
}
static R give_back(P pointer) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto it = blocks.find(pointer);
    if (it == blocks.end()) return INVALID;
    if (it->second.pool) it->second.pool->used -= it->second.bytes;
    else devices[it->second.device].direct -= it->second.bytes;
    free((void*)pointer);
    blocks.erase(it);
    return OK;
}

// --- streams, events, graphs ------------------------------------------------------------------------

struct Graph { std::vector<Work> work; };
struct Event {
    std::mutex lock; std::condition_variable changed;
    uint64_t recorded = 0, done = 0;
    std::chrono::steady_clock::time_point at;
};
struct Stream {
    std::mutex lock; std::condition_variable changed;
    std::deque<Work> queue; Graph* capturing = nullptr;
    uint64_t in = 0, out = 0; bool stop = false;
    std::thread thread;
    Stream() : thread([this] { run(); }) {}
    ~Stream() {
        { std::lock_guard<std::mutex> hold(lock); stop = true; }
        changed.notify_all();
        thread.join();
    }
    void run() {
        for (;;) {
            Work work;
            {
                std::unique_lock<std::mutex> hold(lock);
                changed.wait(hold, [&] { return stop || !queue.empty(); });
                if (queue.empty()) return;
                work = queue.front();
                queue.pop_front();
            }
            work();
            work = nullptr;
            { std::lock_guard<std::mutex> hold(lock); out++; }
            changed.notify_all();
        }
    }
    void push(Work work) {
        {
            std::lock_guard<std::mutex> hold(lock);
            if (capturing) { capturing->work.push_back(work); return; }
            queue.push_back(work);
            in++;
        }
        changed.notify_all();
    }
    void drain() {
        std::unique_lock<std::mutex> hold(lock);
        uint64_t until = in;
        changed.wait(hold, [&] { return out >= until; });
    }
};
static std::mutex streams_lock;
static std::vector<Stream*> streams;
static Stream* standard_stream() {
    static Stream* only = [] { auto* s = new Stream(); std::lock_guard<std::mutex> hold(streams_lock); streams.push_back(s); return s; }();
    return only;
}
static Stream* stream_of(void* handle) { return (uintptr_t)handle <= 2 ? standard_stream() : (Stream*)handle; }

static R unsupported() { return UNSUPPORTED; }

extern "C" {

// --- what tests steer -------------------------------------------------------------------------------

void fakegpu_fail(const char* name, int error, int after, int times) {
    std::lock_guard<std::mutex> hold(fault_lock);
    faults[name] = Fault{error, after, times};
}
void fakegpu_break(int error) { broken = error; }
void fakegpu_mend() { std::lock_guard<std::mutex> hold(fault_lock); faults.clear(); calls.clear(); broken = 0; copy_ms = 0; }
void fakegpu_present(int yes) { present = yes; }
void fakegpu_copy_ms(int ms) { copy_ms = ms; }
void fakegpu_memory(size_t bytes) { find_devices(); std::lock_guard<std::mutex> hold(memory_lock); for (auto& d : devices) d.total = bytes; }
size_t fakegpu_used(int physical) { find_devices(); std::lock_guard<std::mutex> hold(memory_lock); return used_of(physical); }
size_t fakegpu_default_pool(int physical) { std::lock_guard<std::mutex> hold(memory_lock); return devices[physical].standard.reserved; }
uint64_t fakegpu_default_threshold(int physical) { return devices[physical].standard.threshold; }
size_t fakegpu_pinned() { std::lock_guard<std::mutex> hold(memory_lock); size_t sum = 0; for (auto& e : pinned) sum += e.second; return sum; }
long fakegpu_calls(const char* name) { std::lock_guard<std::mutex> hold(fault_lock); return calls[name]; }
long fakegpu_streams() { std::lock_guard<std::mutex> hold(streams_lock); return streams.size(); }

// --- the driver: devices ----------------------------------------------------------------------------

R cuInit(unsigned) { if (!present) return NO_DEVICE; find_devices(); return enter("cuInit"); }
R cuDriverGetVersion(int* v) { *v = 13000; return OK; }
R cuDeviceGetCount(int* c) { ENTER("cuDeviceGetCount"); *c = present ? count : 0; return OK; }
R cuDeviceGet(int* d, int ordinal) { if (!device_of(ordinal)) return BAD_DEVICE; *d = ordinal; return OK; }
R cuDeviceGetName(char* name, int length, int d) { snprintf(name, length, "FakeGPU %d", visible[d]); return OK; }
R cuDeviceGetUuid_v2(void* uuid, int d) {
    memset(uuid, 7, 16);
    ((unsigned char*)uuid)[15] = (unsigned char)(visible[d] / 10 * 16 + visible[d] % 10);
    return OK;
}
R cuDeviceGetUuid(void* uuid, int d) { return cuDeviceGetUuid_v2(uuid, d); }
R cuDeviceGetAttribute(int* v, int attribute, int) {
    switch (attribute) {
        case 75: *v = 9; break;   // compute capability
        case 41: case 115: *v = 1; break;  // unified addressing, memory pools
        default: *v = 0;
    }
    return OK;
}
R cuDeviceTotalMem_v2(size_t* bytes, int d) { *bytes = device_of(d)->total; return OK; }
R cuDevicePrimaryCtxRetain(void** context, int d) { *context = device_of(d); return OK; }
R cuDevicePrimaryCtxRelease_v2(int) { return OK; }
R cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return OK; }
R cuCtxSetCurrent(void* context) { current = (Device*)context; return OK; }
R cuCtxGetCurrent(void** context) { *context = current; return OK; }
R cuCtxPushCurrent_v2(void* context) { current = (Device*)context; return OK; }
R cuCtxPopCurrent_v2(void** context) { if (context) *context = current; return OK; }
R cuCtxGetDevice(int* d) { if (!current) return NO_CONTEXT; *d = number_of_device(current); return OK; }
R cuCtxGetDevice_v2(int* d, void* context) { *d = number_of_device((Device*)context); return OK; }
R cuCtxGetId(void*, unsigned long long* id) { *id = 1; return OK; }
R cuCtxGetStreamPriorityRange(int* low, int* high) { *low = 0; *high = -5; return OK; }
R cuCtxSynchronize() {
    ENTER_WITH_CONTEXT("cuCtxSynchronize");
    std::vector<Stream*> all;
    { std::lock_guard<std::mutex> hold(streams_lock); all = streams; }
    for (auto* stream : all) stream->drain();
    settle_all();
    return broken;
}

// --- the driver: memory -----------------------------------------------------------------------------

R cuMemGetInfo_v2(size_t* free_, size_t* total) {
    ENTER_WITH_CONTEXT("cuMemGetInfo");
    std::lock_guard<std::mutex> hold(memory_lock);
    *total = current->total;
    *free_ = *total - std::min(*total, used_of(current - devices));
    return OK;
}
R cuMemAlloc_v2(P* p, size_t n) { ENTER_WITH_CONTEXT("cuMemAlloc"); return take(p, n, current - devices, nullptr); }
R cuMemFree_v2(P p) { ENTER_WITH_CONTEXT("cuMemFree"); cuCtxSynchronize(); return give_back(p); }
R cuMemAllocAsync(P* p, size_t n, void*) { ENTER_WITH_CONTEXT("cuMemAllocAsync"); return take(p, n, current - devices, &current->standard); }
R cuMemAllocFromPoolAsync(P* p, size_t n, void* pool, void*) { ENTER_WITH_CONTEXT("cuMemAllocFromPoolAsync"); return take(p, n, ((Pool*)pool)->device, (Pool*)pool); }
R cuMemFreeAsync(P p, void* s) { ENTER("cuMemFreeAsync"); stream_of(s)->push([p] { give_back(p); }); return OK; }
R cuDeviceGetDefaultMemPool(void** pool, int d) { *pool = &device_of(d)->standard; return OK; }
R cuDeviceGetMemPool(void** pool, int d) { *pool = &device_of(d)->standard; return OK; }
R cuDeviceSetMemPool(int, void*) { return OK; }
R cuMemGetDefaultMemPool(void** pool, void*, int) { *pool = &current->standard; return OK; }
R cuMemGetMemPool(void** pool, void*, int) { *pool = &current->standard; return OK; }
R cuMemPoolCreate(void** out, const void*) {
    ENTER("cuMemPoolCreate");
    auto* pool = new Pool{current ? (int)(current - devices) : 0, 0, 0, 0};
    std::lock_guard<std::mutex> hold(memory_lock);
    pools.push_back(pool);
    *out = pool;
    return OK;
}
R cuMemPoolDestroy(void* pool) {
    std::lock_guard<std::mutex> hold(memory_lock);
    pools.erase(std::remove(pools.begin(), pools.end(), (Pool*)pool), pools.end());
    return OK;  // leaked on purpose: blocks may still name it
}
R cuMemPoolSetAttribute(void* pool, int attribute, void* value) { if (attribute == 4) ((Pool*)pool)->threshold = *(uint64_t*)value; return OK; }
R cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto* p = (Pool*)pool;
    *(uint64_t*)value = attribute == 4 ? p->threshold : attribute == 5 || attribute == 6 ? p->reserved : attribute == 7 || attribute == 8 ? p->used : 0;
    return OK;
}
R cuMemPoolSetAccess(void*, const void*, size_t) { return OK; }
R cuMemPoolGetAccess(int* flags, void*, void*) { *flags = 3; return OK; }
R cuMemPoolTrimTo(void* pool, size_t keep) { ENTER("cuMemPoolTrimTo"); std::lock_guard<std::mutex> hold(memory_lock); settle((Pool*)pool, keep); return OK; }
R cuMemAllocHost_v2(void** p, size_t n) {
    ENTER_WITH_CONTEXT("cuMemAllocHost");
    if (posix_memalign(p, 4096, n ? n : 1)) return NO_MEMORY;
    std::lock_guard<std::mutex> hold(memory_lock);
    pinned[(P)*p] = n;
    return OK;
}
R cuMemHostAlloc(void** p, size_t n, unsigned) { return cuMemAllocHost_v2(p, n); }
R cuMemFreeHost(void* p) { std::lock_guard<std::mutex> hold(memory_lock); pinned.erase((P)p); free(p); return OK; }
R cuMemcpyAsync(P to, P from, size_t n, void* s) {
    ENTER_WITH_CONTEXT("cuMemcpyAsync");
    stream_of(s)->push([=] {
        if (copy_ms) std::this_thread::sleep_for(std::chrono::milliseconds(copy_ms.load()));
        memcpy((void*)to, (void*)from, n);
    });
    return OK;
}
R cuMemcpyHtoDAsync_v2(P to, const void* from, size_t n, void* s) { return cuMemcpyAsync(to, (P)from, n, s); }
R cuMemcpyDtoHAsync_v2(void* to, P from, size_t n, void* s) { return cuMemcpyAsync((P)to, from, n, s); }
R cuMemsetD8Async(P to, unsigned char value, size_t n, void* s) { ENTER_WITH_CONTEXT("cuMemsetD8Async"); stream_of(s)->push([=] { memset((void*)to, value, n); }); return OK; }
static R attribute_of(void* out, int attribute, P p) {
    std::lock_guard<std::mutex> hold(memory_lock);
    bool device = blocks.count(p), host = pinned.count(p);
    if (attribute == 2) { *(unsigned*)out = device ? 2 : host ? 1 : 0; return device || host ? OK : INVALID; }
    if (attribute == 9) *(int*)out = device ? blocks[p].device : host ? 0 : -2;
    else if (attribute == 8) *(int*)out = 0;
    else *(uint64_t*)out = 0;
    return OK;
}
R cuPointerGetAttribute(void* out, int attribute, P p) { return attribute_of(out, attribute, p); }
R cuPointerGetAttributes(unsigned n, int* attributes, void** out, P p) { for (unsigned i = 0; i < n; i++) attribute_of(out[i], attributes[i], p); return OK; }

// --- the driver: streams, events, graphs ------------------------------------------------------------

R cuStreamCreateWithPriority(void** s, unsigned, int) {
    ENTER_WITH_CONTEXT("cuStreamCreate");
    auto* stream = new Stream();
    std::lock_guard<std::mutex> hold(streams_lock);
    streams.push_back(stream);
    *s = stream;
    return OK;
}
R cuStreamCreate(void** s, unsigned flags) { return cuStreamCreateWithPriority(s, flags, 0); }
R cuStreamDestroy_v2(void* s) {
    { std::lock_guard<std::mutex> hold(streams_lock); streams.erase(std::remove(streams.begin(), streams.end(), (Stream*)s), streams.end()); }
    delete (Stream*)s;
    return OK;
}
R cuStreamSynchronize(void* s) { ENTER("cuStreamSynchronize"); stream_of(s)->drain(); settle_all(); return broken; }
R cuStreamQuery(void* s) { ENTER("cuStreamQuery"); auto* stream = stream_of(s); std::lock_guard<std::mutex> hold(stream->lock); return stream->out >= stream->in ? OK : NOT_READY; }
R cuStreamGetFlags(void*, unsigned* flags) { *flags = 1; return OK; }
R cuStreamGetPriority(void*, int* priority) { *priority = 0; return OK; }
R cuStreamGetCtx(void*, void** context) { *context = current; return OK; }
R cuStreamGetCtx_v2(void*, void** context, void** green) { *context = current; if (green) *green = nullptr; return OK; }
R cuStreamGetDevice(void*, int* d) { *d = current ? number_of_device(current) : 0; return OK; }
R cuStreamGetId(void* s, unsigned long long* id) { *id = (unsigned long long)s; return OK; }
R cuStreamWaitEvent(void* s, void* e, unsigned);
R cuStreamIsCapturing(void* s, int* status) { *status = stream_of(s)->capturing ? 1 : 0; return OK; }
R cuStreamGetCaptureInfo_v2(void* s, int* status, ...) { return cuStreamIsCapturing(s, status); }
R cuStreamGetCaptureInfo_v3(void* s, int* status, ...) { return cuStreamIsCapturing(s, status); }
R cuStreamBeginCapture_v2(void* s, int) { ENTER("cuStreamBeginCapture"); auto* stream = stream_of(s); std::lock_guard<std::mutex> hold(stream->lock); stream->capturing = new Graph(); return OK; }
R cuStreamEndCapture(void* s, void** graph) { auto* stream = stream_of(s); std::lock_guard<std::mutex> hold(stream->lock); *graph = stream->capturing; stream->capturing = nullptr; return enter("cuStreamEndCapture"); }
R cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) { ENTER("cuGraphInstantiate"); *exec = new Graph(*(Graph*)graph); return OK; }
R cuGraphInstantiate_v2(void** exec, void* graph, unsigned long long flags) { return cuGraphInstantiateWithFlags(exec, graph, flags); }
R cuGraphLaunch(void* exec, void* s) { ENTER("cuGraphLaunch"); for (auto& work : ((Graph*)exec)->work) stream_of(s)->push(work); return OK; }
R cuGraphExecDestroy(void* exec) { ENTER("cuGraphExecDestroy"); delete (Graph*)exec; return OK; }
R cuGraphDestroy(void* graph) { ENTER("cuGraphDestroy"); delete (Graph*)graph; return OK; }
R cuLaunchHostFunc(void* s, void (*f)(void*), void* argument) { ENTER_WITH_CONTEXT("cuLaunchHostFunc"); stream_of(s)->push([=] { if (!broken) f(argument); }); return OK; }

R cuEventCreate(void** e, unsigned) { ENTER_WITH_CONTEXT("cuEventCreate"); *e = new Event(); return OK; }
R cuEventDestroy_v2(void* e) { delete (Event*)e; return OK; }
R cuEventRecord(void* e, void* s) {
    ENTER("cuEventRecord");
    auto* event = (Event*)e;
    uint64_t mine;
    { std::lock_guard<std::mutex> hold(event->lock); mine = ++event->recorded; }
    stream_of(s)->push([event, mine] {
        { std::lock_guard<std::mutex> hold(event->lock); event->done = std::max(event->done, mine); event->at = std::chrono::steady_clock::now(); }
        event->changed.notify_all();
    });
    return OK;
}
R cuEventQuery(void* e) { ENTER("cuEventQuery"); auto* event = (Event*)e; std::lock_guard<std::mutex> hold(event->lock); return event->done >= event->recorded ? OK : NOT_READY; }
R cuEventSynchronize(void* e) {
    ENTER("cuEventSynchronize");
    auto* event = (Event*)e;
    {
        std::unique_lock<std::mutex> hold(event->lock);
        uint64_t until = event->recorded;
        event->changed.wait(hold, [&] { return event->done >= until; });
    }
    settle_all();
    return broken;
}
R cuEventElapsedTime_v2(float* ms, void* from, void* to) { *ms = std::chrono::duration<float, std::milli>(((Event*)to)->at - ((Event*)from)->at).count(); return OK; }
R cuEventElapsedTime(float* ms, void* from, void* to) { return cuEventElapsedTime_v2(ms, from, to); }
R cuStreamWaitEvent(void* s, void* e, unsigned) { stream_of(s)->push([e] { cuEventSynchronize(e); }); return OK; }

// --- the driver: names ------------------------------------------------------------------------------

static const std::map<int, const char*> NAMES = {
    {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
};
R cuGetErrorName(int error, const char** name) { auto it = NAMES.find(error); *name = it == NAMES.end() ? "CUDA_ERROR_UNKNOWN" : it->second; return OK; }
R cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
R cuGetExportTable(const void** table, const void*) { *table = nullptr; return UNSUPPORTED; }
R cuGetProcAddress_v2(const char* name, void** out, int, unsigned long long, void* status) {
    static void* self = [] { Dl_info info; dladdr((void*)cuInit, &info); return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); }();
    if (status) *(int*)status = 0;
    *out = nullptr;
    for (const char* suffix : {"_v3", "_v2", "WithFlags", ""})
        if (!*out) *out = dlsym(self, (std::string(name) + suffix).c_str());
    if (!*out) *out = (void*)unsupported;
    return OK;
}
R cuGetProcAddress(const char* name, void** out, int version, unsigned long long flags) { return cuGetProcAddress_v2(name, out, version, flags, nullptr); }
}
