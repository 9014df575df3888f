/* Declarations of what examples/embed.c uses of HIP, for compiling it where there is no ROCm: names, values and types are those of HIP's own header. */
#pragma once
#include <stddef.h>

typedef enum hipError_t { hipSuccess = 0 } hipError_t;
typedef enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 } hipMemcpyKind;
typedef struct ihipModule_t *hipModule_t;
typedef struct ihipModuleSymbol_t *hipFunction_t;
typedef struct ihipStream_t *hipStream_t;

#define HIP_LAUNCH_PARAM_BUFFER_POINTER ((void *)0x01)
#define HIP_LAUNCH_PARAM_BUFFER_SIZE ((void *)0x02)
#define HIP_LAUNCH_PARAM_END ((void *)0x03)

const char *hipGetErrorString(hipError_t error);
hipError_t hipGetDeviceCount(int *count);
hipError_t hipDeviceSynchronize(void);
hipError_t hipMalloc(void **address, size_t bytes);
hipError_t hipFree(void *address);
hipError_t hipMemcpy(void *to, const void *from, size_t bytes, hipMemcpyKind kind);
hipError_t hipModuleLoad(hipModule_t *module, const char *path);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name);
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned dynamic_lds_bytes, hipStream_t stream, void **parameters, void **extra);
