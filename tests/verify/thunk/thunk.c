// A libhsakmt.so.1 whose GPU is the process that loads it: HSA's runtime above it is AMD's own. Interfaces: Debian's hsakmt.h,
// hsakmttypes.h, amd_hsa_queue.h and amd_hsa_signal.h (libhsakmt-dev, libhsa-runtime-dev).
#define _GNU_SOURCE
#include <hsakmt.h>
#include <hsa/amd_hsa_queue.h>
#include <hsa/amd_hsa_signal.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef HSAKMT_STATUS Status;
enum { OK = HSAKMT_STATUS_SUCCESS, CPU = 0, GPU = 1, BLOCKS = 4096, EVENTS = 512, QUEUES = 64, INVALID = 1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, asking = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void *debugged;  // the runtime's list of what it has loaded, as a debugger reads it

// A line of what was asked, to the file that ROCM_SD_PAPER_NOTES names.
static void note(const char *form, ...) {
    static FILE *notes;
    const char *path = getenv("ROCM_SD_PAPER_NOTES");
    if (!notes && !(path && (notes = fopen(path, "a")))) return;
    va_list rest;
    va_start(rest, form);
    vfprintf(notes, form, rest);
    va_end(rest);
    fputc('\n', notes);
    fflush(notes);
}
#define UNKNOWN(name) \
    Status unknown_##name(void) __asm__(#name); \
    Status unknown_##name(void) { note("%s: not supported", #name); return HSAKMT_STATUS_NOT_SUPPORTED; }

// -- the machine ---------------------------------------------------------------------------------------------------------

// ROCM_SD_PAPER_CARD: major, minor and stepping of the gfx id, CUs, SIMDs of a CU, waves of a SIMD, lanes of a wave,
// family by amdgpu_drm.h.
static struct { unsigned major, minor, stepping, cus, simds, waves, lanes, family; } gpu;
enum { LDS_KB = 64 };
static const HSAuint64 kLds = 1ull << 48, kScratch = 2ull << 48, kMemory = 1ull << 30;  // less than trials of far addresses want

Status hsaKmtOpenKFD(void) {
    const char *card = getenv("ROCM_SD_PAPER_CARD");
    int count = sscanf(card ? card : "", "%u %u %u %u %u %u %u %u", &gpu.major, &gpu.minor, &gpu.stepping, &gpu.cus, &gpu.simds,
                       &gpu.waves, &gpu.lanes, &gpu.family);
    return count == 8 ? OK : HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED;
}
Status hsaKmtCloseKFD(void) { return OK; }
Status hsaKmtGetVersion(HsaVersionInfo *info) {
    *info = (HsaVersionInfo){1, 8};
    return OK;
}
Status hsaKmtAcquireSystemProperties(HsaSystemProperties *found) {
    *found = (HsaSystemProperties){.NumNodes = 2};
    return OK;
}
Status hsaKmtReleaseSystemProperties(void) { return OK; }
Status hsaKmtGetNodeProperties(HSAuint32 node, HsaNodeProperties *p) {
    memset(p, 0, sizeof *p);
    p->NumIOLinks = 1, p->MaxEngineClockMhzCCompute = 1000, p->DrmRenderMinor = -1;
    if (node == CPU) {
        p->NumCPUCores = 2, p->NumMemoryBanks = 1, p->NumCaches = 2;
        return OK;
    }
    p->NumFComputeCores = gpu.cus * gpu.simds, p->NumMemoryBanks = 3, p->NumCaches = 2;
    p->Capability.ui32.DoorbellType = 2, p->Capability.ui32.QueueSizePowerOfTwo = 1;
    p->MaxWavesPerSIMD = gpu.waves, p->LDSSizeInKB = LDS_KB, p->WaveFrontSize = gpu.lanes;
    p->NumShaderBanks = 4, p->NumArrays = 2, p->NumCUPerArray = gpu.cus / 8, p->NumSIMDPerCU = gpu.simds;
    p->MaxSlotsScratchCU = 32;
    p->EngineId.ui32.Major = gpu.major, p->EngineId.ui32.Minor = gpu.minor, p->EngineId.ui32.Stepping = gpu.stepping;
    p->EngineId.ui32.uCode = 100;
    p->VendorId = 0x1002, p->DeviceId = 0x73bf, p->LocationId = 0x300, p->LocalMemSize = kMemory;
    p->MaxEngineClockMhzFCompute = 2000, p->DrmRenderMinor = 128;
    const char *name = "Card of paper";
    for (int i = 0; name[i]; i++) p->MarketingName[i] = name[i];
    strcpy((char *)p->AMDName, "paper");
    p->NumCpQueues = 8, p->UniqueID = 0x1234;
    HSAuint32 later[] = {1, 0x4321, gpu.family};  // NumXcc, KFDGpuID, FamilyID of hsakmttypes.h 6.2.4
    _Static_assert(sizeof later == sizeof p->Reserved, "another hsakmttypes.h");
    memcpy(p->Reserved, later, sizeof later);
    return OK;
}
Status hsaKmtGetNodeMemoryProperties(HSAuint32 node, HSAuint32 count, HsaMemoryProperties *p) {
    memset(p, 0, count * sizeof *p);
    if (node == CPU) {
        if (count > 0) p[0].HeapType = HSA_HEAPTYPE_SYSTEM, p[0].SizeInBytes = 2 * kMemory;
        return OK;
    }
    if (count > 0) {
        p[0].HeapType = HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC, p[0].SizeInBytes = kMemory;
        p[0].Width = 256, p[0].MemoryClockMax = 1000;
    }
    if (count > 1) p[1].HeapType = HSA_HEAPTYPE_GPU_LDS, p[1].SizeInBytes = LDS_KB << 10, p[1].VirtualBaseAddress = kLds;
    if (count > 2) p[2].HeapType = HSA_HEAPTYPE_GPU_SCRATCH, p[2].SizeInBytes = kMemory, p[2].VirtualBaseAddress = kScratch;
    return OK;
}
Status hsaKmtGetNodeCacheProperties(HSAuint32 node, HSAuint32 processor, HSAuint32 count, HsaCacheProperties *p) {
    memset(p, 0, count * sizeof *p);
    for (HSAuint32 i = 0; i < count && i < 2; i++)
        p[i].CacheLevel = i + 1, p[i].CacheSize = i ? 4096 : 16, p[i].CacheLineSize = 128, p[i].CacheType.Value = node == CPU ? 5 : 9;
    return OK;
}
Status hsaKmtGetNodeIoLinkProperties(HSAuint32 node, HSAuint32 count, HsaIoLinkProperties *p) {
    memset(p, 0, count * sizeof *p);
    if (count) p->IoLinkType = HSA_IOLINKTYPE_PCIEXPRESS, p->NodeFrom = node, p->NodeTo = !node, p->Weight = 20;
    return OK;
}
Status hsaKmtGetXNACKMode(HSAint32 *enable) {
    *enable = 0;
    return OK;
}
Status hsaKmtSetXNACKMode(HSAint32 enable) { return enable ? HSAKMT_STATUS_NOT_SUPPORTED : OK; }
Status hsaKmtRuntimeEnable(void *address, bool ttmp) {
    debugged = address;
    return OK;
}
Status hsaKmtRuntimeDisable(void) { return OK; }
Status hsaKmtSetTrapHandler(HSAuint32 node, void *code, HSAuint64 size, void *buffer, HSAuint64 buffer_size) { return OK; }
Status hsaKmtSetMemoryPolicy(HSAuint32 node, HSAuint32 usual, HSAuint32 other, void *at, HSAuint64 size) { return OK; }
static HSAuint64 now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
Status hsaKmtGetClockCounters(HSAuint32 node, HsaClockCounters *p) {
    *p = (HsaClockCounters){now(), now(), now(), 1000000000};
    return OK;
}
Status hsaKmtGetTileConfig(HSAuint32 node, HsaGpuTileConfig *config) {
    config->NumTileConfigs = config->NumMacroTileConfigs = 0;
    config->GbAddrConfig = 0x444, config->NumBanks = config->NumRanks = 0;
    return OK;
}

// -- memory --------------------------------------------------------------------------------------------------------------

static struct { char *at; HSAuint64 size; HSAuint32 node; HsaMemFlags flags; void *data; int registered; } blocks[BLOCKS];

static int block_of(const void *address) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at && (char *)address >= blocks[i].at && (char *)address < blocks[i].at + blocks[i].size) return i;
    return -1;
}
static int block_made(void *at, HSAuint64 size, HSAuint32 node, HsaMemFlags flags, int registered) {
    for (int i = 0; i < BLOCKS; i++)
        if (!blocks[i].at) {
            blocks[i].at = at, blocks[i].size = size, blocks[i].node = node, blocks[i].flags = flags;
            blocks[i].data = NULL, blocks[i].registered = registered;
            return i;
        }
    return -1;
}
Status hsaKmtAllocMemory(HSAuint32 node, HSAuint64 size, HsaMemFlags flags, void **address) {
    if (node == GPU && size > kMemory && !flags.ui32.Scratch) return HSAKMT_STATUS_NO_MEMORY;
    HSAuint64 align = size >= 2 << 20 ? 2 << 20 : 4096;  // the runtime wants large ones aligned
    char *at = mmap(NULL, size + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return HSAKMT_STATUS_NO_MEMORY;
    char *begin = (char *)(((HSAuint64)at + align - 1) & ~(align - 1));
    if (begin > at) munmap(at, begin - at);
    munmap(begin + size, at + size + align - (begin + size));
    pthread_mutex_lock(&lock);
    int made = block_made(begin, size, node, flags, 0);
    pthread_mutex_unlock(&lock);
    *address = begin;
    return made < 0 ? HSAKMT_STATUS_NO_MEMORY : OK;
}
Status hsaKmtFreeMemory(void *address, HSAuint64 size) {
    pthread_mutex_lock(&lock);
    int found = block_of(address);
    if (found >= 0) munmap(blocks[found].at, blocks[found].size), blocks[found].at = NULL;
    pthread_mutex_unlock(&lock);
    return found < 0 ? HSAKMT_STATUS_ERROR : OK;
}
Status hsaKmtRegisterMemoryWithFlags(void *address, HSAuint64 size, HsaMemFlags flags) {
    pthread_mutex_lock(&lock);
    block_made(address, size, CPU, flags, 1);
    pthread_mutex_unlock(&lock);
    return OK;
}
Status hsaKmtDeregisterMemory(void *address) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)  // others may overlap it
        if (blocks[i].registered && blocks[i].at == address) {
            blocks[i].at = NULL;
            break;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}
Status hsaKmtMapMemoryToGPU(void *address, HSAuint64 size, HSAuint64 *other) {
    if (other) *other = 0;
    return OK;
}
Status hsaKmtMapMemoryToGPUNodes(void *a, HSAuint64 size, HSAuint64 *other, HsaMemMapFlags flags, HSAuint64 count, HSAuint32 *nodes) {
    return hsaKmtMapMemoryToGPU(a, size, other);
}
Status hsaKmtUnmapMemoryToGPU(void *address) { return OK; }
Status hsaKmtQueryPointerInfo(const void *pointer, HsaPointerInfo *p) {
    static const HSAuint32 nodes[] = {GPU};
    memset(p, 0, sizeof *p);
    pthread_mutex_lock(&lock);
    int found = block_of(pointer);
    if (found >= 0) {
        p->Type = blocks[found].registered ? HSA_POINTER_REGISTERED_USER : HSA_POINTER_ALLOCATED;
        p->Node = blocks[found].node, p->MemFlags = blocks[found].flags;
        p->CPUAddress = blocks[found].at, p->GPUAddress = (HSAuint64)blocks[found].at, p->SizeInBytes = blocks[found].size;
        p->NMappedNodes = 1, p->MappedNodes = nodes, p->UserData = blocks[found].data;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
Status hsaKmtSetMemoryUserData(const void *pointer, void *data) {
    pthread_mutex_lock(&lock);
    int found = block_of(pointer);
    if (found >= 0) blocks[found].data = data;
    pthread_mutex_unlock(&lock);
    return OK;
}

// -- events --------------------------------------------------------------------------------------------------------------

static struct { HsaEvent event; int used, set, manual; } events[EVENTS];
static HSAuint64 mailbox[EVENTS];

Status hsaKmtCreateEvent(HsaEventDescriptor *asked, bool manual, bool set, HsaEvent **made) {
    pthread_mutex_lock(&lock);
    int i = 1;
    while (i < EVENTS && events[i].used) i++;
    if (i < EVENTS) {
        memset(&events[i], 0, sizeof events[i]);
        events[i].used = 1, events[i].set = set, events[i].manual = manual;
        HsaEvent *e = &events[i].event;
        e->EventId = i, e->EventData.EventType = asked->EventType, e->EventData.EventData.SyncVar = asked->SyncVar;
        e->EventData.HWData1 = i, e->EventData.HWData2 = (HSAuint64)&mailbox[i], e->EventData.HWData3 = i;
        *made = e;
    }
    pthread_mutex_unlock(&lock);
    return i < EVENTS ? OK : HSAKMT_STATUS_NO_MEMORY;
}
Status hsaKmtDestroyEvent(HsaEvent *event) {
    pthread_mutex_lock(&lock);
    events[event->EventId].used = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
static void set_event(unsigned number) {
    pthread_mutex_lock(&lock);
    if (number < EVENTS) events[number].set = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
Status hsaKmtSetEvent(HsaEvent *event) {
    set_event(event->EventId);
    return OK;
}
Status hsaKmtWaitOnMultipleEvents(HsaEvent *wanted[], HSAuint32 count, bool all, HSAuint32 ms) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += ms / 1000, end.tv_nsec += ms % 1000 * 1000000;
    if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
    Status status = OK;
    pthread_mutex_lock(&lock);
    for (;;) {
        HSAuint32 ready = 0;
        for (HSAuint32 i = 0; i < count; i++) ready += events[wanted[i]->EventId].set;
        if (ready && (!all || ready == count)) {
            for (HSAuint32 i = 0; i < count; i++)
                if (!events[wanted[i]->EventId].manual) events[wanted[i]->EventId].set = 0;
            break;
        }
        if (!ms || (ms == 0xFFFFFFFF ? pthread_cond_wait(&changed, &lock) : pthread_cond_timedwait(&changed, &lock, &end))) {
            status = HSAKMT_STATUS_WAIT_TIMEOUT;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}
Status hsaKmtWaitOnEvent(HsaEvent *event, HSAuint32 ms) { return hsaKmtWaitOnMultipleEvents(&event, 1, true, ms); }

// -- queues --------------------------------------------------------------------------------------------------------------

static struct queue {
    int used, ended;
    HSA_QUEUE_TYPE type;
    unsigned char *ring;
    HSAuint64 packets, doorbell, *read, *write;
    pthread_t thread;
} queues[QUEUES];

static void complete(hsa_signal_t handle) {
    amd_signal_t *signal = (amd_signal_t *)handle.handle;
    if (!signal) return;
    __atomic_fetch_sub((int64_t *)&signal->value, 1, __ATOMIC_SEQ_CST);
    if (signal->event_mailbox_ptr) {
        *(volatile HSAuint64 *)signal->event_mailbox_ptr = signal->event_id;
        set_event(signal->event_id);
    }
}
static int is_done(hsa_signal_t handle) {
    return !handle.handle || __atomic_load_n((int64_t *)&((amd_signal_t *)handle.handle)->value, __ATOMIC_SEQ_CST) == 0;
}
static void wait_for(struct queue *q, const hsa_signal_t *all) {
    for (int i = 0; i < 5; i++)
        while (!q->ended && !is_done(all[i])) usleep(20);
}
// Hands a dispatch to who executes it, by the socket that ROCM_SD_PAPER_SOCKET names: it reads and writes this process's memory.
// The answer is 0, or the address that a kernel must not touch.
static HSAuint64 executed(const void *packet) {
    static int connection = -1;
    static HSAuint64 told[4 + 2 * BLOCKS];
    HSAuint64 answer = ~0ull, count = 0;
    pthread_mutex_lock(&asking);
    if (connection < 0) {
        struct sockaddr_un place = {.sun_family = AF_UNIX};
        strncpy(place.sun_path, getenv("ROCM_SD_PAPER_SOCKET") ?: "", sizeof place.sun_path - 1);
        connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(connection, (void *)&place, sizeof place)) note("nobody executes: %s", place.sun_path);
    }
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at && !blocks[i].flags.ui32.Scratch) {
            told[4 + 2 * count] = (HSAuint64)blocks[i].at, told[5 + 2 * count] = blocks[i].size;
            count++;
        }
    pthread_mutex_unlock(&lock);
    told[0] = getpid(), told[1] = (HSAuint64)debugged, told[2] = (HSAuint64)packet, told[3] = count;
    size_t size = (4 + 2 * count) * sizeof *told;
    if (send(connection, told, size, MSG_NOSIGNAL) != (ssize_t)size ||
        recv(connection, &answer, sizeof answer, MSG_WAITALL) != sizeof answer)
        note("who executes is gone");
    pthread_mutex_unlock(&asking);
    return answer;
}
static void fault(HSAuint64 address) {
    note("fault at %#llx", (long long)address);
    for (int i = 1; i < EVENTS; i++)
        if (events[i].used && events[i].event.EventData.EventType == HSA_EVENTTYPE_MEMORY) {
            HsaMemoryAccessFault *f = &events[i].event.EventData.EventData.MemoryAccessFault;
            *f = (HsaMemoryAccessFault){.NodeId = GPU, .VirtualAddress = address, .Flags = HSA_EVENTID_MEMORY_FATAL_PROCESS};
            f->Failure.NotPresent = 1;
            set_event(i);
        }
}
// 0 where the queue cannot go on.
static int processed(struct queue *q, unsigned char *packet, unsigned type) {
    hsa_kernel_dispatch_packet_t *p = (void *)packet;
    if (type == HSA_PACKET_TYPE_KERNEL_DISPATCH) {
        note("dispatch block %u %u %u grid %u %u %u private %u group %u", p->workgroup_size_x, p->workgroup_size_y, p->workgroup_size_z,
             p->grid_size_x, p->grid_size_y, p->grid_size_z, p->private_segment_size, p->group_segment_size);
        HSAuint64 wrong = executed(packet);
        if (wrong) fault(wrong);
        return !wrong;
    }
    if (type == HSA_PACKET_TYPE_BARRIER_AND) {
        note("barrier and");
        wait_for(q, (hsa_signal_t *)(packet + 8));
    } else if (type == HSA_PACKET_TYPE_VENDOR_SPECIFIC) {  // format 1: commands for caches that are not here
        note("vendor packet of format %u", packet[2]);
    } else {  // HIP sends no other: ROCclr's rocvirtual.cpp has headers of these and of barrier-and alone
        note("packet of type %u: not supported", type);
        return 0;
    }
    return 1;
}
static void *work(void *argument) {
    struct queue *q = argument;
    HSAuint64 index = __atomic_load_n(q->read, __ATOMIC_SEQ_CST);
    while (!q->ended) {
        unsigned char *packet = q->ring + 64 * (index % q->packets);
        unsigned type = __atomic_load_n((uint16_t *)packet, __ATOMIC_ACQUIRE) & 0xFF;
        if (index >= __atomic_load_n(q->write, __ATOMIC_SEQ_CST) || type == INVALID) {
            usleep(20);
            continue;
        }
        hsa_signal_t completion = *(hsa_signal_t *)(packet + 56);
        HSAuint64 start = now();
        if (!processed(q, packet, type)) return NULL;
        if (completion.handle) {
            amd_signal_t *signal = (amd_signal_t *)completion.handle;
            signal->start_ts = start, signal->end_ts = now();
        }
        __atomic_store_n((uint16_t *)packet, INVALID, __ATOMIC_RELEASE);
        __atomic_store_n(q->read, ++index, __ATOMIC_SEQ_CST);
        complete(completion);
    }
    return NULL;
}
Status hsaKmtCreateQueue(HSAuint32 node, HSA_QUEUE_TYPE type, HSAuint32 share, HSA_QUEUE_PRIORITY priority, void *ring, HSAuint64 size,
                         HsaEvent *event, HsaQueueResource *made) {
    note("queue of type %d", type);
    if (type != HSA_QUEUE_COMPUTE_AQL) return HSAKMT_STATUS_NOT_SUPPORTED;
    int i = 1;
    pthread_mutex_lock(&lock);
    while (i < QUEUES && queues[i].used) i++;
    if (i < QUEUES) queues[i].used = 1;
    pthread_mutex_unlock(&lock);
    if (i == QUEUES) return HSAKMT_STATUS_NO_MEMORY;
    struct queue *q = &queues[i];
    q->ended = 0, q->type = type, q->ring = ring, q->packets = size / 64;
    q->read = made->Queue_read_ptr_aql, q->write = made->Queue_write_ptr_aql;
    made->QueueId = i, made->Queue_DoorBell_aql = &q->doorbell;
    pthread_create(&q->thread, NULL, work, q);
    return OK;
}
Status hsaKmtUpdateQueue(HSA_QUEUEID id, HSAuint32 share, HSA_QUEUE_PRIORITY priority, void *ring, HSAuint64 size, HsaEvent *event) {
    return OK;
}
Status hsaKmtDestroyQueue(HSA_QUEUEID id) {
    queues[id].ended = 1;
    pthread_join(queues[id].thread, NULL);
    queues[id].used = 0;
    return OK;
}
Status hsaKmtSetQueueCUMask(HSA_QUEUEID id, HSAuint32 count, HSAuint32 *mask) { return OK; }

// -- what HSA 6.1 asks for besides: Debian 13's hsakmt.h and amdgpu.h ----------------------------------------------------

Status hsaKmtAvailableMemory(HSAuint32 node, HSAuint64 *bytes) {
    *bytes = kMemory;
    return OK;
}
Status hsaKmtGetRuntimeCapabilities(HSAuint32 *mask) {
    *mask = 0;
    return OK;
}
Status hsaKmtGetAMDGPUDeviceHandle(HSAuint32 node, void **device) {
    *device = &gpu;
    return OK;
}
int amdgpu_query_gpu_info(void *device, HSAuint32 *info) {  // the first words of amdgpu.h's struct
    memset(info, 0, 76);
    info[3] = gpu.family, info[18] = 1000000;  // kHz, as in hsaKmtGetClockCounters
    return 0;
}
Status hsaKmtWaitOnMultipleEvents_Ext(HsaEvent *wanted[], HSAuint32 count, bool all, HSAuint32 ms, uint64_t *age) {
    return hsaKmtWaitOnMultipleEvents(wanted, count, all, ms);
}
Status hsaKmtWaitOnEvent_Ext(HsaEvent *event, HSAuint32 ms, uint64_t *age) { return hsaKmtWaitOnEvent(event, ms); }

UNKNOWN(amdgpu_bo_cpu_map)
UNKNOWN(amdgpu_bo_export)
UNKNOWN(amdgpu_bo_free)
UNKNOWN(amdgpu_bo_import)
UNKNOWN(amdgpu_bo_va_op)
UNKNOWN(drmCommandWriteRead)
UNKNOWN(hsaKmtDbgDisable)
UNKNOWN(hsaKmtDbgEnable)
UNKNOWN(hsaKmtDbgGetDeviceData)
UNKNOWN(hsaKmtDbgGetQueueData)
UNKNOWN(hsaKmtExportDMABufHandle)
UNKNOWN(hsaKmtOpenSMI)
UNKNOWN(hsaKmtReplaceAsanHeaderPage)
UNKNOWN(hsaKmtReturnAsanHeaderPage)
UNKNOWN(hsaKmtSPMAcquire)
UNKNOWN(hsaKmtSPMRelease)
UNKNOWN(hsaKmtSPMSetDestBuffer)

UNKNOWN(hsaKmtAllocQueueGWS)
UNKNOWN(hsaKmtRegisterGraphicsHandleToNodes)
UNKNOWN(hsaKmtRegisterSharedHandle)
UNKNOWN(hsaKmtRegisterSharedHandleToNodes)
UNKNOWN(hsaKmtShareMemory)
UNKNOWN(hsaKmtSVMGetAttr)
UNKNOWN(hsaKmtSVMSetAttr)
